import asyncio
import concurrent.futures
import threading
import time

import pytest

from slime_rollout.errors import HookTimeoutError
from slime_rollout.threads import LoopThread, await_within, call_within


@pytest.fixture
def thread():
    thread = LoopThread("a loop")
    yield thread
    thread.close()


def test_a_loop_thread_gives_what_the_work_returns_or_raises(thread):
    async def main(error):
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return threading.current_thread().name

    assert thread.run(main(None)) == "a loop"
    with pytest.raises(KeyError, match="x"):
        thread.run(main(KeyError("x")))


@pytest.mark.parametrize("place", ["as the wait begins", "in the wait"])
def test_work_has_ended_when_the_wait_for_it_was_interrupted(thread, monkeypatch, place):
    """By ctrl-c in a thread that waits; what is undone then must be undone before anything else is called."""
    steps, plain = [], asyncio.run_coroutine_threadsafe

    async def main():
        steps.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            steps.append("undone")

    def interrupt():
        while not steps:
            time.sleep(0.001)
        monkeypatch.undo()
        raise KeyboardInterrupt

    def interrupted(work, loop):
        future = plain(work, loop)
        if place == "as the wait begins":
            interrupt()
        future.result = interrupt
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(main())
    assert steps == ["begun", "undone"]


def test_what_an_interrupt_kept_from_beginning_never_begins(thread, monkeypatch):
    steps = []

    async def main():
        steps.append("begun")

    def interrupted(work, loop):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(main())
    thread.run(asyncio.sleep(0))
    assert steps == []


def test_another_thread_ends_a_wait_and_the_work_has_ended_then(thread):
    begun, steps = threading.Event(), []

    async def main():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            steps.append("undone")

    def cancel():
        begun.wait(20)
        thread.cancel()

    thread.cancel()  # nothing was begun
    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(concurrent.futures.CancelledError):
        thread.run(main())
    assert steps == ["undone"]
    canceller.join()
    assert thread.run(asyncio.sleep(0, "goes on")) == "goes on"


def test_a_thread_that_is_told_to_stop_cancels_what_runs_and_ends():
    thread, done = LoopThread("another"), []

    async def last():
        done.append("first")

    future = thread.submit(asyncio.sleep(60))
    thread.cancel_all(last)
    assert done == ["first"] and future.cancelled() and not thread._thread.is_alive()


LIMIT = 0.2


@pytest.fixture
def hangs():
    """A function that does not come back during the test."""
    over = threading.Event()
    yield lambda *args: over.wait(20)
    over.set()


@pytest.fixture(params=["waiting", "beside an event loop"])
def call(request):
    if request.param == "waiting":
        return call_within
    return lambda *args: asyncio.run(await_within(*args))


def test_what_it_returns_and_raises(call):
    def divide(over, under):
        return over / under

    assert call(20.0, "it", divide, 6, 3) == 2
    with pytest.raises(ZeroDivisionError):
        call(20.0, "it", divide, 1, 0)


def test_a_time_limit_of_its_own_is_its_own(call):
    def fails():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        call(20.0, "it", fails)


def test_one_that_hangs_is_left(call, hangs):
    start = time.monotonic()
    with pytest.raises(HookTimeoutError, match=r"^it was not done after 0\.2 s; it hangs, .* --hook-timeout$"):
        call(LIMIT, "it", hangs)
    assert time.monotonic() - start < 10


def test_the_event_loop_goes_on_meanwhile(hangs):
    async def both():
        other = asyncio.create_task(asyncio.sleep(0.01))
        with pytest.raises(HookTimeoutError):
            await await_within(LIMIT, "it", hangs)
        return other.done()

    assert asyncio.run(both())
