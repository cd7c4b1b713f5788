"""Running a coroutine to its end, and values that each event loop has of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Value = TypeVar("Value")


class PerLoop(Generic[Value]):
    """A value for each event loop, until that is closed: every rollout runs on a new one.

    A `WeakKeyDictionary` would keep all of them: a semaphore that somebody has waited for refers to its loop.

    Args:
        make: Makes the value.
    """

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._values: dict[asyncio.AbstractEventLoop, Value] = {}

    def here(self) -> Value:
        """The value of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._values:
                self._values = {other: value for other, value in self._values.items() if not other.is_closed()}
                self._values[loop] = self._make()
            return self._values[loop]


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, whose time does not depend on the size of the result.

    `asyncio.run` puts the handler of SIGINT back at the end. `signal.signal` then looks the handler up in an enum and
    fails, for which it writes out the whole task, result included: seconds for a rollout of many tokens.
    """
    results: list[Result] = []

    async def keep() -> None:
        results.append(await main)

    asyncio.run(keep())
    return results[0]
