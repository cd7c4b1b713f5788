"""Generation that goes on while the trainer works: a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from slime_rollout.collect import Collector

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ContinuousCollector:
    """A `Collector` that lives in a thread. What it has in flight goes on between calls.

    Args:
        make: Opens the collector; its context ends with :meth:`close`.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Collector]]) -> None:
        self._make = make
        self._opened: Future[tuple[asyncio.AbstractEventLoop, Collector, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, name="continuous generation", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[Collector], Awaitable[T]]) -> T:
        """Do something with the collector in its thread, between any two steps of its own, and wait for it.

        Raises:
            Exception: Whatever ``action`` raises, or what opening the collector raised.
            KeyboardInterrupt: While this waits; what ``action`` waits for is then cancelled.
        """
        loop, collector, _ = self._opened.result()

        async def act() -> T:
            return await action(collector)

        done = asyncio.run_coroutine_threadsafe(act(), loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()  # nobody would get what it gives
            raise

    def close(self) -> None:
        """Stop what is in flight, and end the thread. Does nothing the second time."""
        if self._thread.is_alive() and self._opened.exception() is None:
            loop, _, stop = self._opened.result()
            loop.call_soon_threadsafe(stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            if self._opened.done():
                logger.error("generation beside the trainer did not end well: %s: %s", type(error).__name__, error)
            else:
                self._opened.set_exception(error)

    async def _live(self) -> None:
        stop = asyncio.Event()
        async with self._make() as collector:
            self._opened.set_result((asyncio.get_running_loop(), collector, stop))
            try:
                await stop.wait()
            finally:
                await collector.cancel()
