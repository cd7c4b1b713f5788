"""A plain function in a thread of its own, which is left behind if the function does not end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a function returned, or what it raised."""


def start_call(thread: str, function: Callable[..., Any], *args: Any) -> Future[Outcome]:
    """Call a function in a daemon thread, which does not keep the process alive.

    Args:
        thread: The thread's name.
        function: Raises what it likes.
        *args: What it is called with.

    Returns:
        Its outcome. The future itself does not fail; cancelling it ends the wait, not the call.
    """
    answer: Future[Outcome] = Future()

    def run() -> None:
        try:
            outcome: Outcome = function(*args), None
        except BaseException as error:
            outcome = None, error
        if answer.set_running_or_notify_cancel():
            answer.set_result(outcome)

    # No executor: Python joins an executor's threads at exit, so one stuck call would keep the process alive.
    threading.Thread(target=run, name=thread, daemon=True).start()
    return answer
