"""Waiting for Ray actors: signals are heard within a moment, the first failure ends the wait, and errors are ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from slime_core.errors import SlimeError
from slime_launch.errors import RunError
from slime_launch.watch import Watch

Result = TypeVar("Result")

POLL_SECONDS = 0.2
LOG_LINES = 15


def gather(pending: Mapping[Any, Worker], *, on_poll: Callable[[], None] = lambda: None) -> list[Any]:
    """Wait for one call on each of some workers.

    Args:
        pending: Ray reference of the result → the worker that computes it.
        on_poll: Called a few times a second meanwhile; must not wait for anything itself.

    Returns:
        The results, in the mapping's order.

    Raises:
        SlimeError: As raised by the worker.
        Stopped: A signal asked the run to stop.
        RunError: A worker died, or failed in another way; with the last lines of its log.
    """
    import ray

    results: dict[Any, Any] = {}
    waiting = list(pending)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_SECONDS)
        for ref in ready:
            results[ref] = _result(ref, pending[ref])
        for worker in pending.values():
            worker.watch.check()
        if waiting:
            on_poll()
    return [results[ref] for ref in pending]


class Worker:
    """A Ray actor with a name for messages and a log.

    Args:
        name: Such as ``trainer rank 0``.
        handle: The actor's handle.
        log_path: Where its output goes.
        watch: Ends waits for this worker.
    """

    def __init__(self, name: str, handle: Any, log_path: Path, watch: Watch) -> None:
        self.name = name
        self.handle = handle
        self.log_path = log_path
        self.watch = watch

    def start_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; returns a reference for :func:`gather`."""
        return getattr(self.handle, method).remote(*args, **kwargs)

    def call(self, method: str, *args: Any, on_poll: Callable[[], None] = lambda: None, **kwargs: Any) -> Any:
        """Call a method and wait for its result; errors as in :func:`gather`."""
        return gather({self.start_call(method, *args, **kwargs): self}, on_poll=on_poll)[0]

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of its log."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End the actor at once."""
        import ray

        ray.kill(self.handle, no_restart=True)


class Call(Generic[Result]):
    """A call of a worker that is under way.

    Args:
        worker: Who is called.
        method: What is called.
        *args: With what.
    """

    def __init__(self, worker: Worker, method: str, *args: Any) -> None:
        self._worker = worker
        self._ref = worker.start_call(method, *args)

    def done(self) -> bool:
        """Whether it has ended, after a moment's wait.

        Raises:
            Stopped: A signal asked the run to stop.
            RunError: A part of the run is gone.
        """
        import ray

        ready, _ = ray.wait([self._ref], timeout=POLL_SECONDS)
        self._worker.watch.check()
        return bool(ready)

    def result(self) -> Result:
        """Its result. Errors as in :func:`gather`."""
        result: Result = _result(self._ref, self._worker)
        return result


class Question:
    """A call that is repeated and never waited for.

    Args:
        workers: Who is called.
        method: What is called on each; must return at once.
    """

    def __init__(self, workers: Sequence[Worker], method: str) -> None:
        self._workers = list(workers)
        self._method = method
        self._asked: dict[Any, Worker] = {}
        self._answers: list[Any] = []

    def answers(self) -> list[Any]:
        """The last answers of all workers together, in their order; none before the first. Asks again.

        Raises:
            SlimeError: As raised by a worker.
            RunError: A worker died.
        """
        import ray

        if not self._asked:
            self._asked = {worker.start_call(self._method): worker for worker in self._workers}
        ready, waiting = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        results = {ref: _result(ref, self._asked[ref]) for ref in ready}
        if not waiting:
            self._answers = [results[ref] for ref in self._asked]
            self._asked = {}
        return self._answers


def _result(ref: Any, worker: Worker) -> Any:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeError):
            raise cause from None
        raise RunError(f"{worker.name} failed with {type(cause).__name__}: {cause}{_where(worker)}") from error
    except RayActorError as error:
        raise RunError(f"{worker.name} died{_where(worker)}") from error
    except RayError as error:  # a result that is lost, a placement group that is gone …
        raise RunError(f"Ray lost {worker.name}: {error}{_where(worker)}") from error


def _where(worker: Worker) -> str:
    tail = worker.log_tail()
    return f"; the last lines of {worker.log_path}:\n{tail}" if tail else f"; its log is {worker.log_path}"
