"""An event loop in a thread of its own: what blocks it blocks nobody else, and it outlives the loops that ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class LoopThread:
    """A running event loop in a daemon thread, which does not keep the process alive.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._loop = _Loop()
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run something there. Cancelling the future cancels it there, and does not wait for that."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def responds(self, seconds: float) -> bool:
        """Whether something else could run there within so many seconds."""
        answer = asyncio.wrap_future(self.submit(asyncio.sleep(0)))
        done, _ = await asyncio.wait([answer], timeout=seconds)
        answer.cancel()
        return bool(done)

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """End the thread once all that runs there has ended, and ``last`` after it. Nothing may be submitted any more.

        Does not wait.
        """

        async def stop() -> None:
            try:
                while others := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(others)
                if last is not None:
                    await last()
            finally:
                self._loop.stop()

        self.submit(stop())

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


class _Loop(asyncio.SelectorEventLoop):
    """Its `asyncio.to_thread` takes daemon threads: Python joins others at exit, and waits for one that hangs."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        return super().run_in_executor(executor or _DaemonThreads(), func, *args)


class _DaemonThreads(Executor):
    """Runs each call in a daemon thread of its own."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        threading.Thread(target=run, name=threading.current_thread().name, daemon=True).start()
        return answer
