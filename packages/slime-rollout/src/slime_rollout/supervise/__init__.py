"""Processes that never outlive the one that started them.

    starter ──pipe──▶ supervisor ──▶ command ──▶ its children, their children …
                      (subreaper)               (also those that detach themselves)

The starter holds the pipe's write end, the supervisor (`reaper`) its read end. However the starter ends, SIGKILL
included, the kernel closes the write end, and the supervisor ends every process below it. A parent-death signal alone
would not do: it reaches only the direct child, and it follows the thread that forked, not the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slime_core.errors import SlimeError
from slime_core.files import open_to_append
from slime_rollout.supervise import reaper
from slime_rollout.supervise.folders import private_folder
from slime_rollout.supervise.forked import Forked, fork
from slime_rollout.supervise.reaper import (
    POLL_SECONDS,
    Process,
    descendants,
    find_process,
    is_alive,
    is_stopped,
    send_signal,
)

__all__ = [
    "POLL_SECONDS",
    "Process",
    "Supervised",
    "SupervisionError",
    "descendants",
    "find_process",
    "is_alive",
    "is_stopped",
    "private_folder",
    "send_signal",
    "under_supervisor",
]

_STOP_MARGIN_SECONDS = 10.0
# SGLang writes all its settings into one line of 20 kB, which would hide the error below it.
LOG_BYTES, LINE_LIMIT = 65_536, 400
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PIPES: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def _close_pipes() -> None:
    """In a child that was forked without exec."""
    for pipe in list(_PIPES):
        pipe.close()


os.register_at_fork(after_in_child=_close_pipes)


class SupervisionError(SlimeError):
    """A supervised process tree that could not be started or ended."""


class Supervised(contextlib.AbstractContextManager["Supervised"]):
    """A command that runs under a supervisor of its own, and ends when this process ends. Made by :meth:`start`.

    As a context manager it stops the tree on exit. Dropping the last reference stops it, too.
    """

    # The pipe's write end is close-on-exec, so no program that this process starts inherits it, and a child that Python
    # forks without exec (`multiprocessing` with `fork`) closes its copy. A child forked in C without exec keeps a copy;
    # for that case the supervisor also looks once a second whether its parent is still the same.

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Forked,
        pipe: io.FileIO,
        *,
        grace: float,
        log_path: Path | None,
        log_start: int,
        folder: Path | None = None,
    ) -> None:
        self._process = process
        self._pipe = pipe
        self._grace = grace
        self._log_start = log_start
        self._folder = folder
        self.log_path = log_path

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        grace: float = 5.0,
        stdin: int | None = subprocess.DEVNULL,
        remove_files: str | None = None,
        folder: Path | None = None,
        template: str | None = None,
    ) -> Supervised:
        """Start ``command`` in a session of its own.

        Args:
            env: Its whole environment; this process's if ``None``.
            log_path: File to append its output to; this process's own output if ``None``.
            grace: Seconds the command gets after SIGTERM to end by itself, and then what it left behind again.
            remove_files: Beginning of paths. Such files that the tree had open are removed when it has ended.
            folder: Removed with all that is in it when the tree has ended.
            stdin: As in :class:`subprocess.Popen`.
            template: Address of a process that has imported what the command does, to fork in place of starting an
                interpreter; see :func:`~slime_rollout.supervise.forked.template`. Needs ``log_path``.

        Raises:
            SupervisionError: The log file cannot be written.
        """
        log_start = log_path.stat().st_size if log_path is not None and log_path.exists() else 0
        read_end, write_end = os.pipe()
        pipe = io.FileIO(write_end, "w")
        _PIPES.add(pipe)
        settings = {"parent": os.getpid(), "grace": grace, "remove_files": remove_files}
        settings["folder"] = None if folder is None else str(folder)
        supervisor = [sys.executable, "-I", "-S", reaper.__file__, json.dumps(settings | {"pipe_fd": read_end})]
        try:
            with open_to_append(log_path) if log_path is not None else contextlib.nullcontext() as log:
                process: subprocess.Popen[bytes] | Forked | None = None
                if template is not None and log is not None:
                    variables = os.environ if env is None else env
                    files = {"pipe": read_end, "log": log.fileno()}
                    process = fork(template, command, environment=variables, settings=settings, **files)
                process = process or subprocess.Popen(
                    [*supervisor, *command],
                    env=env,
                    stdin=stdin,
                    stdout=log,
                    stderr=subprocess.STDOUT if log is not None else None,
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        except OSError as error:
            pipe.close()
            raise SupervisionError(f"cannot start {command[0]}: {error}") from error
        finally:
            os.close(read_end)
        return cls(process, pipe, grace=grace, log_path=log_path, log_start=log_start, folder=folder)

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def poll(self) -> int | None:
        """The command's exit code, or ``None`` while anything of it is left.

        128 + n means that signal n ended the command; a negative number, that a signal ended the supervisor.
        """
        return self._process.poll()

    @property
    def ending(self) -> str:
        """That code, in words."""
        return f"exit code {self._process.poll()}"

    def process_ids(self) -> list[int]:
        """Process ids of the command itself, then of all that it started; none once it has ended."""
        return [process.pid for process in reaper.descendants(self.pid)]

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the whole tree to end, or raise `subprocess.TimeoutExpired`; the exit code as in :meth:`poll`."""
        return self._process.wait(timeout)

    def signal(self, signum: int) -> None:
        """Signal the supervisor: the first SIGTERM or SIGINT ends the tree gracefully, a second one at once."""
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Have the whole tree ended by SIGKILL, without waiting; this also ends processes stopped by SIGSTOP."""
        # The supervisor may be stopped, too. SIGCONT comes last, so that it finds the other one when it goes on.
        for signum in (reaper.KILL_SIGNAL, signal.SIGCONT):
            self._process.send_signal(signum)

    def request_stop(self) -> None:
        """Ask the supervisor to end the tree, without waiting."""
        if not self._pipe.closed:
            with contextlib.suppress(OSError):  # it has ended
                self._pipe.write(b".")  # the end of the pipe alone is not seen while a child forked in C has a copy
            self._pipe.close()

    def stop(self, timeout: float | None = None) -> int:
        """End the tree; a `SupervisionError` if any is left after ``timeout`` seconds, or both grace periods."""
        self.request_stop()
        limit = timeout if timeout is not None else 2 * self._grace + _STOP_MARGIN_SECONDS
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            raise SupervisionError(
                f"the supervisor {self.pid} is still busy {limit:g} s after it was asked to stop"
            ) from None
        if self._folder is not None:  # the supervisor has removed it, unless it was killed
            shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that it wrote to its log, long ones cut off; empty without one."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - max(LOG_BYTES, LINE_LIMIT * lines)))
            return "\n".join(line[:LINE_LIMIT] for line in file.read().decode(errors="replace").splitlines()[-lines:])

    def __exit__(self, *error: object) -> None:
        self.stop()


@contextlib.contextmanager
def under_supervisor(command: Sequence[str], *, grace: float = 10.0) -> Iterator[Callable[[], int]]:
    """Start a command, and end it with the block; gives a function that waits for its end and returns its exit code.

    That code is 128 + n for signal n, and comes when the command and everything that this process started is gone.
    While it is waited for, the first SIGINT, SIGTERM or SIGHUP is passed to the command, which gets ``grace`` seconds
    to end in order; a second one ends the tree at once. A command that had to be killed then has the first signal's
    code. If this process is killed, the supervisor ends the tree; if the supervisor is killed, this process does. It
    takes over the whole process: call it from a main thread. A block that is left without waiting kills the tree.

    Args:
        command: Program and arguments. It inherits standard input and output, but runs in a session of its own.
        grace: Seconds between SIGTERM and SIGKILL, for the command and then for what it leaves behind.
    """
    reaper.become_subreaper()
    supervised = Supervised.start(command, grace=grace, stdin=None)

    def wait() -> int:
        received: list[int] = []
        with _forwarding(supervised, received):
            code = supervised.wait()
            left = {process.pid for process in reaper.descendants(os.getpid())}  # of a supervisor that was killed
            reaper.end_descendants(grace, reap=lambda: list(reaper.ended_children()), hurry=lambda: len(received) > 1)
            reaper.remove_torch_memory(left)
        if code < 0:
            print(f"the supervisor was ended by signal {-code}; everything below it was stopped", file=sys.stderr)
            return 128 - code
        if received and code == 128 + signal.SIGKILL:  # by the supervisor: memory was not short
            return 128 + received[0]
        return code

    try:
        yield wait
    finally:
        supervised.kill()
        supervised.wait()


@contextlib.contextmanager
def _forwarding(supervised: Supervised, received: list[int]) -> Iterator[None]:
    """Pass each signal on once, also one that comes while another is passed on: a second one ends the tree at once."""

    def forward(signum: int, _frame: types.FrameType | None) -> None:
        received.append(signum)
        supervised.signal(signum)

    old = {signum: signal.signal(signum, forward) for signum in _FORWARDED}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
