import asyncio
import time

import pytest
from aiohttp import web

from slime_core.types import Sample
from slime_rollout.errors import RewardError
from slime_rollout.rewards import VerifierError
from slime_rollout.rewards.scorers import RemoteReward


def ask(answer, *, count=1, timeout=5.0):
    """Scores of ``count`` samples from a service that answers with ``answer(number, body)``; and what it was sent."""
    bodies = []

    async def handle(request):
        bodies.append(await request.json())
        given = answer(len(bodies) - 1, bodies[-1])
        given = await given if asyncio.iscoroutine(given) else given
        if isinstance(given, int) and given >= 400:
            return web.Response(status=given, text="scripted")
        return given if isinstance(given, web.Response) else web.json_response(given)

    async def run():
        app = web.Application()
        app.router.add_post("/score", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        reward = RemoteReward(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/score", timeout=timeout)
        samples = [
            Sample(index=index, group_index=0, prompt="a", response=f"b{index}", label="c") for index in range(count)
        ]
        try:
            return await asyncio.gather(*map(reward, samples), return_exceptions=True)
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), 60)), bodies


def test_a_number_or_numbers_by_name():
    scores, bodies = ask(lambda number, body: 0.5)
    assert scores == [0.5]
    assert bodies == [{"prompt": "a", "response": "b0", "label": "c"}]
    assert ask(lambda number, body: {"score": 1, "style": True})[0] == [{"score": 1.0, "style": 1.0}]


def test_every_sample_gets_its_own_score_with_64_at_once():
    running, most = 0, 0

    async def answer(number, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return float(body["response"][1:])

    assert ask(answer, count=150)[0] == [float(index) for index in range(150)]
    assert 8 < most <= 64


def test_server_errors_are_tried_again():
    scores, bodies = ask(lambda number, body: 500 if number < 2 else 1.0)
    assert (scores, len(bodies)) == ([1.0], 3)


def test_a_service_that_stays_broken_costs_the_sample():
    scores, bodies = ask(lambda number, body: 500)
    assert isinstance(scores[0], VerifierError) and "HTTP 500" in str(scores[0])
    assert len(bodies) == 4


def test_a_service_that_hangs_costs_the_sample():
    start = time.monotonic()
    scores, _ = ask(lambda number, body: asyncio.sleep(5), timeout=0.2)
    assert isinstance(scores[0], VerifierError) and "time limit of 0.2 s" in str(scores[0])
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    "garbage", ["<html>", '"1.0"', "null", "[1]", "{}", '{"a": "b"}', "1e999", "NaN", "\x00\xff", ""]
)
def test_garbage_costs_the_sample(garbage):
    scores, _ = ask(lambda number, body: web.Response(body=garbage.encode("latin-1")))
    assert isinstance(scores[0], VerifierError)
    assert "not a finite number" in str(scores[0])


def test_a_refusal_ends_the_run():
    scores, bodies = ask(lambda number, body: 404)
    assert isinstance(scores[0], RewardError) and not isinstance(scores[0], VerifierError)
    assert "--rm-url refused sample 0" in str(scores[0])
    assert len(bodies) == 1
