"""Plain functions beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a plain function in a daemon thread.

    Not an executor: Python joins an executor's threads at exit, so one stuck function would keep the process alive.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(*args), None)
        except BaseException as error:
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(deliver, outcome)
        except RuntimeError:  # the loop ended before the function did
            return

    threading.Thread(target=run, name="slime-reward", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value
