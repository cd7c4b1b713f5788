import asyncio
import json
import random
import time

import pytest
from aiohttp import web

from slime_core.types import Sample
from slime_rollout.errors import RewardError
from slime_rollout.rewards import VerifierError
from slime_rollout.rewards.scorers import RemoteReward


def served(handle, samples, **settings):
    """The address of a service whose requests ``handle`` answers, and what each sample's score is, or raises."""

    async def run():
        app = web.Application()
        app.router.add_post("/score", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/score"
        try:
            return url, await asyncio.gather(*map(RemoteReward(url, **settings), samples), return_exceptions=True)
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), 100))


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

    samples = [
        Sample(index=index, group_index=0, prompt="a", response=f"b{index}", label="c") for index in range(count)
    ]
    return served(handle, samples, timeout=timeout)[1], bodies


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


NO_REWARD = "not a finite number or an object of them"
LACKS = "without score"
WHOLE = b'{"score": 0.75, "style": 0.5, "answer": "42"}'


def all_cases():
    """Bodies, each with a part of what is said about it. Somebody trains on the part ``score``."""
    texts = [
        "",
        " ",
        "null",
        '""',
        '"0.75"',
        '"NaN"',
        "[]",
        "{}",
        "[0.75]",
        "[[0.75]]",
        '[{"score": 0.75}]',
        "OK",
        "yes",
    ]
    texts += [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "1e300",
        "-1e300",
        "1" + "0" * 400,
        "3.5e38",
        "0.75 0.5",
    ]
    texts += [
        "0,75",
        ".75",
        "+1",
        "01",
        "0x1",
        "1_0",
        "٣",
        "<html><h1>502 Bad Gateway</h1></html>",
        "// 1\n0.75",
        "[" * 90_000,
    ]
    texts += ['"' + "a" * 900_000 + '"', "\ufeff1", "True", "undefined", '{"score"', '{"score": }', "{'score': 0.75}"]
    odd = [None, "0.75", "high", [], [0.75], {}, {"value": 0.75}, 10**400, 1e300, -1e300]
    texts += [json.dumps({"score": value, "style": 0.5}) for value in odd]
    texts += ['{"score": ' + value + ', "style": 0.5}' for value in ("NaN", "1e999", "-Infinity", "1,2")]
    texts += [json.dumps({"error": words}) for words in ("busy", None, {"message": "no"}, ["no"])]
    bodies = [text.encode() for text in texts] + [bytes(900), b"\xff\xfe0", WHOLE.decode().encode("utf-16"), WHOLE * 2]
    bodies += [WHOLE[:cut] for cut in random.Random(49).sample(range(1, len(WHOLE)), 8)]
    cases = [(body, NO_REWARD) for body in bodies]
    others = [{"error": "busy", "code": 500}, {"status": 0, "ok": True}, {"data": {"score": 1}, "id": 7}, {"Score": 1}]
    cases += [(json.dumps(other).encode(), LACKS) for other in others]
    too_large = b"[" + b"0," * 600_000 + b"0]"
    return [*cases, (too_large, "an answer of more than 1,000,000 bytes"), (b" " * 10**6 + b"1", "1,000,000 bytes")]


def score(bodies):
    """What asking a service that answers so gives or raises, one sample each; and its address."""

    async def handle(request):
        return web.Response(body=bodies[int((await request.json())["response"])])

    samples = [Sample(index=place, group_index=0, prompt="a", response=f"{place}") for place in range(len(bodies))]
    return served(handle, samples, timeout=10.0, keys={"score"})


def test_right_answers_of_a_service_are_taken():
    _, found = score([WHOLE, b"0.75", b'{"score": true}', b"-3.4e38"])
    assert found == [{"score": 0.75, "style": 0.5, "answer": "42"}, 0.75, {"score": 1.0}, -3.4e38]


@pytest.mark.timeout(120)
def test_no_invalid_answer_of_a_service_is_a_reward_and_each_is_said_with_the_address():
    cases = all_cases()
    assert len(cases) >= 50
    url, found = score([body for body, _ in cases])
    wrong = []
    for (body, said), outcome in zip(cases, found, strict=True):
        words = str(outcome)
        is_said = type(outcome) is VerifierError and url in words and said in words
        if not is_said or "\n" in words or len(words) > 1000:
            wrong.append(f"{body[:100]!r} (expected: {said}): {outcome!r}"[:500])
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}:", *wrong])
