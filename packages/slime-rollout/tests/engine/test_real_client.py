"""The client on real SGLang servers: what it aborts there, and what then comes back."""

import asyncio
import contextlib
import time

import pytest

from slime_core.types import Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate import EngineClient
from slime_rollout.http import call
from slime_rollout.limits import ModelLimits

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LONG = 8000  # tokens: seconds, so that a busy machine finds a request running, and stops it before its end
SAME = 1e-4


def params(new_tokens=LONG, seed=1):
    return {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}


def running_requests(urls):
    return sum(load["num_running_reqs"] for url in urls for load in call("GET", f"{url}/v1/loads")["loads"])


def was_aborted(fleet, rid):
    """Whether an engine says that it has dropped a request."""
    logs = [slot.process._process.log_path.read_text() for slot in fleet._engines]
    return any(f"Abort {kind} request. req.rid='{rid}'" in log for log in logs for kind in ("queued", "running"))


def wait_until_idle(fleet):
    asyncio.run(until(lambda: running_requests(fleet.engine_urls) == 0))


@contextlib.contextmanager
def paused(fleet):
    """Engines that take all they run back into their queues, and finish nothing by themselves."""
    for url in fleet.engine_urls:
        call("POST", f"{url}/pause_generation", {"mode": "retract"})
    try:
        yield
    finally:
        for url in fleet.engine_urls:
            call("POST", f"{url}/continue_generation", {})


async def until(condition, seconds=20.0):
    """As soon as the condition holds, how long that took."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)
    return time.monotonic() - began


def in_client(url, script, timeout=100.0):
    async def run():
        async with asyncio.timeout(120), EngineClient(url, concurrency=64, timeout=timeout) as client:
            return await script(client)

    return asyncio.run(run())


async def whole(client, done, prompt):
    """The same request, not stopped, as far as the other one came."""
    return await client.generate(prompt, params(len(done.tokens)))


def test_an_engine_takes_the_longest_prompt_and_adds_what_there_is_room_for(fleet, tiny_model):
    """One token more is refused: what is known of a context before a run is what the engine does."""
    limits = ModelLimits.of(tiny_model)
    longest = limits.longest_prompt()
    shorter = longest - 100

    async def script(client):
        asked = {length: params(limits.context - length) for length in (shorter, longest)}
        done = [await client.generate([5] * length, given) for length, given in asked.items()]
        with pytest.raises(GenerationError, match="exceeds the maximum allowed length"):
            await client.generate([5] * (longest + 1), params(1))
        return [len(one.tokens) for one in done]

    assert in_client(fleet.engine_urls[0], script) == [limits.tokens_left(shorter), limits.tokens_left(longest)]


@pytest.mark.parametrize("place", ["router", "engine"])
def test_an_aborted_request_gives_the_tokens_it_has_with_their_log_probs(fleet, place):
    async def script(client):
        task = asyncio.create_task(client.generate([5, 6, 7], params(), rid="stopped"))
        await until(lambda: running_requests(fleet.engine_urls) == 1)
        await client.abort("stopped")
        assert task.done()
        return task.result(), await whole(client, task.result(), [5, 6, 7])

    done, expected = in_client(fleet.router_url if place == "router" else fleet.engine_urls[0], script)
    assert done.status is Status.ABORTED
    assert 0 < len(done.tokens) < LONG
    assert len(done.tokens) == len(done.log_probs) == len(done.weight_versions)
    assert done.tokens == expected.tokens
    assert max(abs(a - b) for a, b in zip(done.log_probs, expected.log_probs, strict=True)) < SAME


def test_cancelling_frees_the_engine(fleet):
    rids = [f"gone {i}" for i in range(4)]

    async def script(client):
        tasks = [asyncio.create_task(client.generate([5, 6, 7], params(), rid=rid)) for rid in rids]
        await until(lambda: running_requests(fleet.engine_urls) == 4)
        with paused(fleet):  # so that none is over before
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return await until(lambda: all(was_aborted(fleet, rid) for rid in rids))

    seconds = in_client(fleet.router_url, script)
    wait_until_idle(fleet)
    print(f"four cancelled requests were dropped after {seconds:.2f} s")


def test_a_deadline_frees_the_engine(fleet):
    async def script(client):
        task = asyncio.create_task(client.generate([5, 6, 7], params(), rid="late"))
        await until(lambda: running_requests(fleet.engine_urls) == 1)
        with paused(fleet), pytest.raises(GenerationError, match="gave no answer within 3 s"):
            await task
        await until(lambda: was_aborted(fleet, "late"))

    in_client(fleet.router_url, script, timeout=3.0)
    wait_until_idle(fleet)


def test_abort_all_ends_everything_at_once(fleet):
    """Many more than run at once, so most of them wait in the engines or here."""

    async def script(client):
        tasks = [asyncio.create_task(client.generate([5, 6, 7 + i % 90], params(LONG, i))) for i in range(100)]
        await until(lambda: running_requests(fleet.engine_urls) >= 2)
        await client.abort_all()
        assert all(task.done() for task in tasks)
        return [task.result() for task in tasks]

    done = in_client(fleet.router_url, script)
    assert {one.status for one in done} == {Status.ABORTED}
    assert all(len(one.tokens) == len(one.log_probs) < LONG for one in done)
    assert any(one.tokens for one in done) and not all(one.tokens for one in done)
    wait_until_idle(fleet)


def test_what_runs_is_told_once_and_stops(fleet, monkeypatch):
    """Not when it is told again: by then it would have come to its end here, and gone on for long elsewhere."""
    monkeypatch.setattr("slime_rollout.generate.client._ABORT_AGAIN", ())

    async def script(client):
        tasks = [asyncio.create_task(client.generate([5, 6, 7 + i], params(LONG, i))) for i in range(4)]
        await until(lambda: running_requests(fleet.engine_urls) == 4)
        await client.abort_all()
        return [task.result() for task in tasks]

    done = in_client(fleet.router_url, script)
    assert {one.status for one in done} == {Status.ABORTED}
    assert all(0 < len(one.tokens) < LONG for one in done)


def test_a_request_aborted_while_engines_are_paused(fleet):
    """As in a weight update: the engine has taken the request back into its queue, with the tokens it has."""

    async def script(client):
        task = asyncio.create_task(client.generate([5, 6, 7], params(), rid="paused"))
        await until(lambda: running_requests(fleet.engine_urls) == 1)
        with paused(fleet):
            await client.abort("paused")
            assert task.done()
        return task.result(), await whole(client, task.result(), [5, 6, 7])

    done, expected = in_client(fleet.router_url, script)
    assert done.status is Status.ABORTED
    assert (done.tokens, len(done.log_probs)) == (expected.tokens, len(done.tokens))
