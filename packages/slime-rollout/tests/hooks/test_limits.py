import asyncio
import threading
import time

import pytest

from slime_rollout.errors import HookTimeoutError
from slime_rollout.hooks.limits import await_within, call_within

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
