import asyncio
import contextlib
import threading
import time

import pytest

from slime_rollout.errors import RewardError, VerifierError
from slime_rollout.rewards import custom
from slime_rollout.rewards.custom import FunctionCalls

LOOP = asyncio.Runner()  # one event loop for all calls, as in a run
LIMIT = 0.5


def run(work):
    return LOOP.run(asyncio.wait_for(work, 60))


async def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def failure(made, *args):
    with pytest.raises(VerifierError) as caught:
        await made("sample 3", *args)
    return str(caught.value)


def test_a_blocking_async_function_delays_nothing_and_costs_its_own_call():
    release = threading.Event()

    async def blocks(value):
        if value == "block":
            release.wait(30)
        return value

    made = FunctionCalls("own", blocks, timeout=LIMIT)

    async def work():
        assert await made("sample 1", 1) == 1
        blocked, longest, latest = asyncio.create_task(failure(made, "block")), 0.0, time.monotonic()
        while not blocked.done():
            await asyncio.sleep(0.01)
            longest, latest = max(longest, time.monotonic() - latest), time.monotonic()
        assert longest < 5  # `blocks` takes 30 s
        assert "own took more than 0.5 s for sample 3" in await blocked
        assert await made("sample 4", 4) == 4  # on another loop
        release.set()
        await wait_until(lambda: not made._running)

    run(work())


def test_async_calls_share_one_loop_over_all_rollouts():
    loops = set()

    async def notes():
        loops.add(asyncio.get_running_loop())
        return 1

    made = FunctionCalls("own", notes, timeout=20.0)

    async def rollout():
        return await asyncio.gather(*(made("sample 1") for _ in range(100)))

    async def work():
        return [await rollout(), await rollout()]

    assert run(work()) == [[1] * 100] * 2
    assert len(loops) == 1


def test_its_thread_ends_with_the_last_reference():
    async def one():
        return threading.current_thread()

    made = FunctionCalls("own", one, timeout=20.0)
    thread = run(made("sample 1"))
    assert thread.is_alive() and thread.daemon
    del made
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_at_most_32_calls_run_at_once(asynchronous):
    running, most, lock = 0, 0, threading.Lock()

    def count(change):
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    def plain():
        count(1)
        time.sleep(0.02)
        count(-1)

    async def waits():
        count(1)
        await asyncio.sleep(0.02)
        count(-1)

    made = FunctionCalls("own", waits if asynchronous else plain, timeout=20.0)

    async def work():
        await asyncio.gather(*(made("sample 1") for _ in range(100)))

    run(work())
    assert 8 < most <= 32


def test_cancelling_a_call_cancels_what_it_awaits_and_frees_its_turn():
    ended = threading.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    made = FunctionCalls("own", waits, timeout=30.0)

    async def work():
        asked = [asyncio.create_task(made("sample 1")) for _ in range(2 * custom.AT_ONCE)]
        await wait_until(lambda: len(made._running) == custom.AT_ONCE)
        for task in asked:
            task.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)
        await wait_until(lambda: not made._running)

    run(work())
    assert ended.is_set()


def test_what_is_cancelled_inside_a_function_is_its_own_failure():
    async def cancels():
        asyncio.get_running_loop().call_soon((inner := asyncio.get_running_loop().create_future()).cancel)
        await inner

    def plain():
        raise asyncio.CancelledError

    for function in (cancels, plain):
        assert "raised CancelledError" in run(failure(FunctionCalls("own", function, timeout=20.0)))


def test_a_function_that_raises_timeout_error_is_not_taken_for_a_slow_one():
    async def raises():
        raise TimeoutError("of the judge")

    assert run(failure(FunctionCalls("own", raises, timeout=20.0))) == (
        "own raised TimeoutError for sample 3: of the judge"
    )


async def answer(made, value):
    """What a call returns that does not hang; a busy machine may be late with it."""
    for _ in range(20):
        with contextlib.suppress(VerifierError):
            return await made("sample 1", value)
    return None


def test_calls_that_are_left_behind_take_nobodys_turn_and_end_the_run_when_there_are_eight():
    release = threading.Event()

    def hangs(value):
        if value == "hang":
            release.wait(60)
        return value

    made = FunctionCalls("own", hangs, timeout=LIMIT)

    async def work():
        for number in range(custom.MOST_STUCK):
            assert await answer(made, number) == number
            await failure(made, "hang")
        await asyncio.sleep(2 * LIMIT)
        with pytest.raises(RewardError, match=r"own: 8 calls go on after twice their time limit of 0\.5 s") as caught:
            await made("sample 9", 9)
        assert not isinstance(caught.value, VerifierError)
        release.set()
        await wait_until(lambda: not made._running)
        assert await answer(made, 9) == 9  # they ended after all

    run(work())


def test_calls_on_a_loop_that_one_of_them_blocks_count_once():
    release = threading.Event()

    async def some_block(value):
        if value == "block":
            release.wait(60)
        await asyncio.sleep(0.02)
        return value

    made = FunctionCalls("own", some_block, timeout=LIMIT)

    async def work():
        values = ["block", *range(20)]
        await asyncio.gather(*(made("sample 1", value) for value in values), return_exceptions=True)
        await asyncio.sleep(2 * LIMIT)
        assert len(made._running) > custom.MOST_STUCK
        assert await made("sample 2", 2) == 2
        release.set()
        await wait_until(lambda: not made._running)

    run(work())


def test_an_async_function_that_will_not_be_cancelled_stalls_nobody():
    async def retries():
        for _ in range(300):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    made = FunctionCalls("own", retries, timeout=LIMIT)
    start = time.monotonic()
    assert "took more than" in run(failure(made))
    assert time.monotonic() - start < 10  # all of it would take 15 s
