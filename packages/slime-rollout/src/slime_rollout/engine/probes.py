"""Questions whether a process works. Each is asked in a thread that may wait for the answer."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future

from slime_rollout.engine.errors import EngineError
from slime_rollout.engine.process import ServingProcess
from slime_rollout.engine.server import SGLangEngine
from slime_rollout.http import HttpError, call

START_TIMEOUT_SECONDS = 10.0
AGAIN_SECONDS = 0.5


@dataclasses.dataclass
class Probe:
    """A question to a process that somebody else waits for.

    Attributes:
        answer: ``None`` if all is well, else what is wrong.
        since: When it was asked, in seconds of the monotonic clock.
        updates: How many weight updates had begun by then.
    """

    answer: Future[str | None]
    since: float
    updates: int


def no_answer(url: str, timeout: float, stopping: threading.Event) -> str | None:
    """Ask until there is a good answer; ``None``, or what is wrong once ``timeout`` seconds have passed.

    Args:
        url: A question that a process which works answers with success.
        timeout: Longest wait for a good answer in seconds. Bad and refused ones do not count before.
        stopping: Ends the wait.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            call("GET", url, timeout=max(deadline - time.monotonic(), 0.1))
        except HttpError as error:
            problem = str(error)
        else:
            return None
        if time.monotonic() >= deadline - AGAIN_SECONDS or stopping.wait(AGAIN_SECONDS):
            return f"gave no good answer within {timeout:g} s: {problem}"


def not_ready(process: ServingProcess) -> str | None:
    """``None`` once a process that was started answers, and is as it was at the fleet's start."""
    try:
        if not process.is_ready(START_TIMEOUT_SECONDS):
            return "did not answer"
        if isinstance(process, SGLangEngine):
            process.freeze_gc()
    except EngineError:  # it has ended, which is seen elsewhere
        return "has ended"
    return None
