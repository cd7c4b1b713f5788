"""User-defined plain functions within a time limit.

Each call has a thread of its own. A thread cannot be stopped, so one that takes too long is left behind; it is a daemon
and does not keep the process alive. A function that lets no other thread run, such as one endless regular expression,
is not noticed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

from slime_rollout.errors import HookTimeoutError
from slime_rollout.threads import CallOutcome, start_call

FLAG = "--hook-timeout"
_THREAD = "slime-hook"


def call_within(seconds: float, what: str, function: Callable[..., Any], *args: Any, flag: str = FLAG) -> Any:
    """Call a function and wait for it, in a thread that does nothing else meanwhile.

    Args:
        seconds: The time limit.
        what: The function's name, for the message.
        function: Raises what it likes, which is raised here.
        *args: What it is called with.
        flag: What sets the limit, for the message.

    Raises:
        HookTimeoutError: It took longer.
    """
    answer = start_call(_THREAD, function, *args)
    if not concurrent.futures.wait([answer], timeout=seconds).done:
        raise _too_long(seconds, what, flag)
    return _given(answer.result())


async def await_within(seconds: float, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """As :func:`call_within`, without blocking the event loop."""
    try:
        async with asyncio.timeout(seconds):
            outcome = await asyncio.wrap_future(start_call(_THREAD, function, *args))
    except TimeoutError:
        raise _too_long(seconds, what, FLAG) from None
    return _given(outcome)


def _given(outcome: CallOutcome) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _too_long(seconds: float, what: str, flag: str) -> HookTimeoutError:
    return HookTimeoutError(f"{what} was not done after {seconds:g} s; it hangs, or needs a higher {flag}")
