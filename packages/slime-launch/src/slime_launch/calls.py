"""Calls of Ray actors: what a worker process does first, how its results are waited for, and what ends every wait."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from slime_core.errors import SlimeError
from slime_core.files import open_to_append
from slime_core.importing import leave_to_user
from slime_core.redact import redact_logs
from slime_launch.errors import LostContactError, RayDiedError, RunError, Stopped
from slime_launch.processes import Place, own_place
from slime_rollout.supervise import find_process

Result = TypeVar("Result")

POLL_SECONDS = 0.2
CAUSE_SECONDS = 10.0
LOG_LINES = 15
# What torch says on a rank that waits in vain for another: gloo's source files, and NCCL's functions and errors.
LOST_CONTACT = ("gloo/transport", "NCCL", "nccl")
# What torch says of a GPU that no longer works for this process. (Not run on CUDA.)
DEVICE_FAILED = "CUDA error: "
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DUMP_STACKS = signal.SIGUSR2
"""Has a worker's process write the stacks of its threads to its log, whatever it does."""


class Watch:
    """Asked at every poll of every wait. Signals are only noted when they come, for raising inside Ray breaks it.

    Attributes:
        workers: All that were ever started, for whoever looks for the cause of a stall.
        nodes: Gives Ray's ids of the nodes that the run has, if it has several; asks Ray.
        stall: What is said of a wait without progress; it ends with that.
        ray_hangs: Whether that is because a process of Ray's own is stopped.
        launcher: The process of the command, whose end stops the run.
    """

    def __init__(self, launcher: int | None = None) -> None:
        self.launcher = launcher
        self._signum: int | None = None
        self._checks: list[Callable[[], None]] = []
        self.workers: list[Worker] = []
        self.nodes: Callable[[], Iterable[str]] = tuple
        self.stall: str | None = None
        self.ray_hangs = False

    def listen(self, *, at_once: bool) -> None:
        """Take SIGINT, SIGTERM and SIGHUP over, again if something else has done so meanwhile.

        With ``at_once`` one ends the process, for nothing has to be stopped in order yet; else it is only noted.
        """
        for signum in SIGNALS:
            signal.signal(signum, self._leave if at_once else self._note)

    def add(self, check: Callable[[], None]) -> None:
        """Also call ``check``, which raises if the part of the run that it looks at is gone."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise if the wait must end.

        Raises:
            Stopped: A signal has come.
            RunError: A part of the run is gone.
        """
        if self._signum is not None:
            raise Stopped(self._signum)
        for check in self._checks:
            check()

    def _leave(self, signum: int, _frame: types.FrameType | None) -> NoReturn:
        leave(signum, self.launcher)

    def _note(self, signum: int, _frame: types.FrameType | None) -> None:
        if self._signum is None:
            self._signum = signum


def leave(signum: int, launcher: int | None) -> NoReturn:
    """End this process with the exit code that a shell expects; the supervisor ends what it has started."""
    os.write(2, stopped_line(signum, launcher).encode())
    os._exit(128 + signum)


def stopped_line(signum: int, launcher: int | None = None) -> str:
    """The last line of a stopped run.

    The supervisor stops a run by a signal, too, whose ``launcher`` was killed: then that is why.
    """
    process = None if launcher is None else find_process(launcher)
    is_killed = launcher is not None and (process is None or not process.alive)
    why = f"its launcher (process {launcher}) was killed" if is_killed else signal.Signals(signum).name
    return f"slime-launch: stopped {'because' if is_killed else 'by'} {why}; the same command goes on from --save\n"


def prepare(directory: str, log_path: str, *, threads: int | None) -> None:
    """Set this process up as a worker of the run: the launcher's working directory, the log, threads of torch."""
    if Path(directory).is_dir():
        os.chdir(directory)  # where relative paths start; a worker of a cluster starts elsewhere
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(Path(log_path)) as log:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log.fileno(), number)
    redact_logs()
    leave_to_user()
    faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(threads)
        # Trainer and engine share these cores: a thread that waits must not spin.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


class Host:
    """The class of a Ray actor: a process of the run.

    Attributes:
        held: An object that others call, if there is one.
    """

    held: Any = None

    def __init__(self, directory: str, log_path: str, *, threads: int | None) -> None:
        prepare(directory, log_path, threads=threads)

    def introduce(self) -> Place:
        """Where this process is."""
        return own_place()

    def call_held(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object that is held."""
        return getattr(self.held, method)(*args, **kwargs)


class Worker:
    """A Ray actor with a name for messages, such as ``trainer rank 0``, a log, and what ends waits for it.

    ``lost`` is raised where it has died or hangs.
    """

    def __init__(
        self, name: str, handle: Any, log_path: Path, watch: Watch, *, lost: type[RunError] = RunError
    ) -> None:
        self.name = name
        self.handle = handle
        self.log_path = log_path
        self.watch = watch
        self.lost = lost
        self._introduced: Any = None
        watch.workers.append(self)

    def introduce(self) -> None:
        """Ask where it runs; its class is a :class:`Host`."""
        self._introduced = self.start_call(Host.introduce.__name__)

    def place(self) -> Place | None:
        """Where it runs; ``None`` as long as it has not said so."""
        import ray

        if self._introduced is None or not ray.wait([self._introduced], timeout=0)[0]:
            return None
        try:
            place: Place = ray.get(self._introduced)
        except ray.exceptions.RayError:
            return None
        return place

    def start_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method by its name, which :class:`~slime_launch.remote.Remote` has; returns a reference."""
        return getattr(self.handle, method).remote(*args, **kwargs)

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
    """A call under way on some workers: Ray reference of the result → the worker that computes it.

    One that is not ``awaited`` for its own sake goes on where the run makes no progress.
    """

    def __init__(self, pending: Mapping[Any, Worker], *, awaited: bool = True) -> None:
        self._awaited = awaited
        self._pending = dict(pending)
        self._waiting = list(pending)
        self._results: dict[Any, Result] = {}

    def done(self, seconds: float = POLL_SECONDS) -> bool:
        """Whether all have ended, after a moment's wait.

        Raises:
            SlimeError: As raised by the worker.
            Stopped: A signal asked the run to stop.
            RunError: A worker died (its ``lost``), or failed in another way; with the last lines of its log. Of workers
                that wait for each other, that is the one that the others lost, or the names of those that hang. The
                run made no progress for too long.
        """
        import ray

        ready, waiting = ray.wait(self._waiting, num_returns=len(self._waiting), timeout=seconds)
        self._waiting = waiting
        lost = self._take(ready)
        for worker in self._pending.values():
            worker.watch.check()
        if lost is not None:
            self._raise_cause(lost)
        if self._waiting and self._awaited:
            self._check_stall()
        return not self._waiting

    def _check_stall(self) -> None:
        silent = [self._pending[ref] for ref in self._waiting]
        watch = silent[0].watch
        if watch.stall is not None:
            stall, watch.stall = watch.stall, None
            lost = RayDiedError if watch.ray_hangs else silent[0].lost
            raise lost(f"{', '.join(worker.name for worker in silent)} did not end: {stall}")

    def _take(self, ready: list[Any]) -> LostContactError | None:
        """Keep what has ended; the error of a worker that another one left alone, if nothing worse has happened."""
        lost = None
        for ref in ready:
            try:
                self._results[ref] = _result(ref, self._pending[ref])
            except LostContactError as error:
                lost = error
        return lost

    def _raise_cause(self, lost: LostContactError) -> NoReturn:
        """A worker lost another: raise what happened to that one, which may take a moment to be known."""
        import ray

        deadline = time.monotonic() + CAUSE_SECONDS
        while self._waiting and time.monotonic() < deadline:
            ready, self._waiting = ray.wait(self._waiting, num_returns=1, timeout=POLL_SECONDS)
            self._take(ready)
            for worker in self._pending.values():
                worker.watch.check()
        silent = [self._pending[ref] for ref in self._waiting]
        if not silent:
            raise lost
        names = ", ".join(worker.name for worker in silent)
        raise silent[0].lost(f"{names} did not end, and others have waited in vain: {lost}")

    def wait(self, on_poll: Callable[[], None] = lambda: None) -> list[Result]:
        """The results once all have ended, as of :meth:`done`; ``on_poll`` is called meanwhile."""
        while not self.done():
            on_poll()
        return self.results()

    def results(self) -> list[Result]:
        """The results, in the workers' order, once all have ended."""
        return [self._results[ref] for ref in self._pending]


def gather(pending: Mapping[Any, Worker], *, on_poll: Callable[[], None] = lambda: None) -> list[Any]:
    """Wait for one call on each of some workers; results and errors as of :class:`Call`.

    ``on_poll`` is called a few times a second meanwhile, and must not wait for anything itself.
    """
    return Call[Any](pending).wait(on_poll)


def _result(ref: Any, worker: Worker) -> Any:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    from slime_megatron.service import TrainerCheckpointError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause
        lost_contact = any(mark in str(cause) for mark in LOST_CONTACT)
        # Other errors of ours that name gloo or NCCL are about engines. A checkpoint is written by all ranks together.
        if isinstance(cause, SlimeError) and not (lost_contact and isinstance(cause, TrainerCheckpointError)):
            raise cause from None
        kind = RunError
        if lost_contact:
            kind = LostContactError
        elif DEVICE_FAILED in str(cause):
            kind = worker.lost
        raise kind(f"{worker.name} failed with {type(cause).__name__}: {cause}{_where(worker)}") from error
    except RayActorError as error:
        raise worker.lost(f"{worker.name} died{_node_of(error)}{_where(worker)}") from error
    except RayError as error:  # a result that is lost, a placement group that is gone …
        raise worker.lost(f"Ray lost {worker.name}: {error}{_where(worker)}") from error


def _node_of(error: Exception) -> str:
    """Words about the node of an actor that died with it; Ray takes a node that it cannot reach for dead."""
    address = re.search(r"^\tip: (\S+)$", str(error), re.MULTILINE)
    if "node has died" not in str(error):
        return ""
    return f" with its node{f' {address[1]}' if address else ''}, which is down or cannot be reached"


def _where(worker: Worker) -> str:
    tail = worker.log_tail()
    return f"; the last lines of {worker.log_path}:\n{tail}" if tail else f"; its log is {worker.log_path}"
