"""Work in other threads: plain calls that may never end, also within a time limit, and an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from slime_core.errors import DataError, SlimeError
from slime_rollout.errors import HookTimeoutError

Result = TypeVar("Result")

HOOK_FLAG = "--hook-timeout"
_HOOK_THREAD = "slime-hook"
_STOP_SECONDS = 10.0


def start_call(thread: str, function: Callable[..., Result], *args: Any) -> Future[Result]:
    """Call a function, which may never return, in a daemon thread, which does not keep the process alive."""
    answer: Future[Result] = Future()

    def run() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function(*args))
            except BaseException as error:
                answer.set_exception(error)

    # No executor: Python joins an executor's threads at exit, so one stuck call would keep the process alive.
    threading.Thread(target=run, name=thread, daemon=True).start()
    return answer


def call_within(seconds: float, what: str, function: Callable[..., Any], *args: Any, flag: str = HOOK_FLAG) -> Any:
    """Call a user-defined function in a thread of its own and wait for it; raises what it raises.

    A thread cannot be stopped, so a function that takes too long is left behind, with a `HookTimeoutError` that names
    ``what`` it is and the ``flag`` of the limit. One that lets no other thread run, such as an endless regular
    expression, is not noticed.
    """
    answer = start_call(_HOOK_THREAD, function, *args)
    if not concurrent.futures.wait([answer], timeout=seconds).done:
        raise _too_long(seconds, what, flag)
    return answer.result()


async def await_within(
    seconds: float, what: str, function: Callable[..., Any], *args: Any, flag: str = HOOK_FLAG
) -> Any:
    """As :func:`call_within`, without blocking the event loop."""
    answer = asyncio.wrap_future(start_call(_HOOK_THREAD, function, *args))
    try:
        if not (await asyncio.wait([answer], timeout=seconds))[0]:
            raise _too_long(seconds, what, flag)
        return answer.result()
    finally:
        answer.cancel()


def _too_long(seconds: float, what: str, flag: str) -> HookTimeoutError:
    return HookTimeoutError(f"{what} was not done after {seconds:g} s; it hangs, or needs a higher {flag}")


@contextlib.contextmanager
def blaming(what: str, error_type: type[SlimeError] = DataError) -> Iterator[None]:
    """Within the block, what a user-defined function raises becomes a `SlimeError` that says ``what`` it is."""
    try:
        yield
    except SlimeError:
        raise
    except (Exception, SystemExit) as error:
        raise error_type(f"{what} raised {type(error).__name__}: {error}") from error


async def all_of(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Run things together; the results in order. The first error stops the others and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one if asyncio.iscoroutine(one) else _awaited(one)) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    return [task.result() for task in running]


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


class LoopThread:
    """A running event loop in a daemon thread, which does not keep the process alive.

    With ``daemon_calls``, calls by `asyncio.to_thread` do not keep it alive either.
    """

    def __init__(self, name: str, *, daemon_calls: bool = True) -> None:
        self._loop = asyncio.new_event_loop()
        self._awaited: Future[Any] | None = None
        self._lock = threading.Lock()  # what runs already is the awaited one for whoever cancels it
        if daemon_calls:
            self._loop.set_default_executor(_DaemonThreads())
        self._thread = threading.Thread(target=_live, args=(self._loop,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run something there. Cancelling the future cancels it, without waiting for its end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run something there and wait for it. If the wait is interrupted, the work is cancelled, and has ended."""
        future: Future[Result] | None = None
        try:
            with self._lock:
                future = self._awaited = self.submit(work)
            return future.result()
        except BaseException:
            # An interrupt can come before the future is known here, while its work runs there already.
            if future is None or future.cancel():
                self._wait_for_end(work, cancel=future is None)
            raise

    def cancel(self) -> None:
        """Interrupt the last :meth:`run`, where another thread still waits in it: it raises `CancelledError`."""
        with self._lock:
            awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def _wait_for_end(self, work: Coroutine[Any, Any, Any], *, cancel: bool) -> None:
        async def ended() -> None:
            if tasks := [task for task in asyncio.all_tasks() if task.get_coro() is work]:
                for task in tasks if cancel else ():
                    task.cancel()
                await asyncio.wait(tasks)
            else:
                work.close()  # it never began

        concurrent.futures.wait([self.submit(ended())], timeout=_STOP_SECONDS)

    async def responds(self, seconds: float) -> bool:
        """Whether something else could run there within so many seconds."""
        answer = asyncio.wrap_future(self.submit(asyncio.sleep(0)))
        done, _ = await asyncio.wait([answer], timeout=seconds)
        answer.cancel()
        return bool(done)

    def close(self) -> None:
        """Without waiting: end the thread once all that runs there has ended."""

        async def stop() -> None:
            try:
                while others := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(others)
            finally:
                self._loop.stop()

        self.submit(stop())

    def cancel_all(self, first: Callable[[], Awaitable[None]]) -> None:
        """Run ``first``, cancel everything else that runs there, and end the thread; waits for that a few seconds."""

        async def stop() -> None:
            try:
                await first()
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
            finally:
                self.close()

        done = self.submit(stop())
        if threading.current_thread() is not self._thread:  # as when the garbage collector ran there
            concurrent.futures.wait([done], timeout=_STOP_SECONDS)
            self._thread.join(_STOP_SECONDS)


def _live(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread of its own: Python joins the threads of a pool at exit."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        return start_call(threading.current_thread().name, functools.partial(fn, *args, **kwargs))
