"""Calls of a function of the user's, which may be plain or async, slow, blocking or endless."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from slime_rollout.daemon_thread import Outcome, start_call
from slime_rollout.errors import RewardError, VerifierError
from slime_rollout.event_loop import PerLoop
from slime_rollout.loop_thread import LoopThread

AT_ONCE = 32  # calls: enough for functions that wait, few enough that those that compute end within their limit
MOST_STUCK = 8
_PING_SECONDS = 0.25
_THREAD = "slime-reward"


class FunctionCalls:
    """Calls a function away from the event loop, at most 32 times at once, each within a time limit.

    A plain function gets a thread for each call. What is async runs on an event loop in another thread; when a call
    blocks that, the next ones get a new one. What goes on after its time limit cannot be stopped: it is left behind,
    and takes nobody's turn. Once eight calls go on after twice their time limit, there are no more calls.

    Args:
        name: The function's, for messages.
        function: Takes the arguments of a call; gives a value, or something to await for it.
        timeout: Time limit of one call, in seconds. Waiting for a turn is not counted.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, timeout: float) -> None:
        self._name, self._function, self._timeout = name, function, timeout
        self._turns = PerLoop(lambda: asyncio.Semaphore(AT_ONCE))
        self._lock = threading.Lock()
        self._running: dict[object, tuple[LoopThread | None, float]] = {}
        self._loop: LoopThread | None = None
        self._closing: weakref.finalize[[], Any] | None = None
        self._blocked: weakref.WeakSet[LoopThread] = weakref.WeakSet()

    async def __call__(self, about: str, *args: Any) -> Any:
        """What the function gives.

        Args:
            about: What the call is about, for messages.
            args: Its arguments.

        Raises:
            VerifierError: It raised or took too long.
            RewardError: Too many calls before it go on without end.
        """
        async with self._turns.here():
            self._refuse_if_stuck()
            try:
                async with asyncio.timeout(self._timeout):
                    value, error = await self._call(args)
            except TimeoutError:
                await self._replace_blocked_loop()
                raise VerifierError(
                    f"{self._name} took more than {self._timeout:g} s for {about}; make it faster or raise --rm-timeout"
                ) from None
        if isinstance(error, RewardError):
            raise error
        if error is not None:
            raise VerifierError(f"{self._name} raised {type(error).__name__} for {about}: {error}") from error
        return value

    async def _call(self, args: tuple[Any, ...]) -> Outcome:
        if inspect.iscoroutinefunction(self._function):
            return await self._on_loop(self._function, args)
        value, error = await self._in_thread(args)
        return await self._on_loop(_awaited, (value,)) if inspect.isawaitable(value) else (value, error)

    async def _in_thread(self, args: tuple[Any, ...]) -> Outcome:
        call = object()

        def run() -> Any:
            try:
                return self._function(*args)
            finally:
                self._end(call)

        with self._lock:
            self._running[call] = None, time.monotonic()
        return await asyncio.wrap_future(start_call(_THREAD, run))

    async def _on_loop(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        call = object()

        async def run() -> Outcome:
            try:
                return await function(*args), None
            except GeneratorExit:
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                return None, error  # a CancelledError too: of something that it awaited, not of this call
            finally:
                self._end(call)

        with self._lock:
            if self._loop is None:
                self._loop = LoopThread(_THREAD)
                self._closing = weakref.finalize(self, self._loop.close)
            self._running[call] = self._loop, time.monotonic()
            answer = self._loop.submit(run())
        return await asyncio.wrap_future(answer)

    def _end(self, call: object) -> None:
        with self._lock:
            del self._running[call]

    def _refuse_if_stuck(self) -> None:
        late = time.monotonic() - 2 * self._timeout
        with self._lock:
            # A blocked loop holds up every call on it, and only one of them is to blame.
            stuck = {
                loop if loop in self._blocked else call for call, (loop, start) in self._running.items() if start < late
            }
        if len(stuck) >= MOST_STUCK:
            raise RewardError(
                f"{self._name}: {len(stuck)} calls go on after twice their time limit of {self._timeout:g} s, and "
                "cannot be stopped; give what it waits for a time limit of its own"
            )

    async def _replace_blocked_loop(self) -> None:
        loop = self._loop
        if loop is None or await loop.responds(_PING_SECONDS):
            return
        with self._lock:
            if self._loop is loop and self._closing is not None:
                self._blocked.add(loop)
                self._loop = None
                self._closing()


async def _awaited(value: Any) -> Any:
    return await value
