"""The supervisor process, and the walk over a process tree that it needs.

It is run by its path (``python -I -S reaper.py …``), so it uses the standard library only and is up in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02
# Besides the pipe, the parent's pid is compared this often: a child that the parent forked in C without exec holds a
# copy of the pipe's write end, and would keep it open after the parent's death.
PARENT_CHECK_SECONDS = 1.0
# Has the supervisor kill the tree at once. Python says nothing of it where it comes before the supervisor handles it.
KILL_SIGNAL = signal.SIGUSR1
# torch names the memory that a process shares `torch_<pid>_…`. Its manager removes it when that process is gone, unless
# the manager is killed, too, as it is by whoever ends a whole tree (Ray does so for each of its workers).
SHARED_MEMORY = "/dev/shm"
TORCH_MEMORY = "torch"


@dataclasses.dataclass(frozen=True)
class Process:
    """One process, distinct from a later one with the same pid.

    ``start_time`` is in clock ticks after boot. ``parent``, ``alive`` and ``stopped`` are from when it was looked at;
    it is alive if any of its threads is. The kernel calls a process whose first thread has ended a zombie, but the
    other threads may run on for ever, and those of a killed process take a moment to end.
    """

    pid: int
    start_time: int
    parent: int = dataclasses.field(compare=False)
    alive: bool = dataclasses.field(compare=False)
    stopped: bool = dataclasses.field(compare=False)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def become_subreaper() -> None:
    """Have orphaned descendants re-parented to this process instead of to init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def find_process(pid: int) -> Process | None:
    """A process that is there, a zombie included."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  (pathlib would double the start-up time)
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # Fields of proc(5) after the command's name: 3 state, 4 ppid, … 20 num_threads, … 22 starttime.
    alive = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
    return Process(pid, int(fields[19]), int(fields[1]), alive, stopped=fields[0] in (b"T", b"t"))


def descendants(root: int) -> list[Process]:
    """All living processes below ``root``, parents before children. Zombies are left out."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (process := find_process(int(name))) is not None:
            children.setdefault(process.parent, []).append(process)
    order, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        queue += [process.pid for process in below]
        order += [process for process in below if process.alive]
    return order


def open_files(pid: int) -> list[str]:
    """Paths of a process's open files; none if it has just ended."""
    paths = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # closed meanwhile
                paths.append(os.readlink(f"/proc/{pid}/fd/{name}"))  # noqa: PTH115
    return paths


def remove_torch_memory(pids: set[int]) -> None:
    """Remove the files of shared memory that torch left behind for those of the processes that have ended."""
    with contextlib.suppress(OSError):
        for name in os.listdir(SHARED_MEMORY):  # noqa: PTH208
            kind, _, rest = name.partition("_")
            pid = rest.partition("_")[0]
            if kind == TORCH_MEMORY and pid.isdigit() and int(pid) in pids and not is_alive(int(pid)):
                with contextlib.suppress(OSError):  # its manager was quicker
                    os.unlink(f"{SHARED_MEMORY}/{name}")  # noqa: PTH108


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, or a debugger, has stopped a process."""
    process = find_process(pid)
    return process is not None and process.stopped


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended; a zombie has."""
    process = find_process(pid)
    return process is not None and process.alive


def send_signal(process: Process, signum: int) -> None:
    """Send a signal to this very process, never to a later one that got its pid."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if find_process(process.pid) == process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, signum)
    finally:
        os.close(handle)


def ended_children() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: pid and wait status of each."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            yield ended


def end_descendants(grace: float, *, reap: Callable[[], object], hurry: Callable[[], bool]) -> None:
    """End every process below this one, which must be a subreaper: SIGKILL follows SIGTERM after ``grace`` seconds.

    ``reap`` is called often, and collects exited children; ``hurry`` says whether to send SIGKILL now.
    """
    deadline = time.monotonic() + grace
    asked: set[Process] = set()
    while alive := descendants(os.getpid()):
        late = hurry() or time.monotonic() > deadline
        for process in alive:
            if late:
                send_signal(process, signal.SIGKILL)
            elif process not in asked:
                send_signal(process, signal.SIGTERM)
                asked.add(process)
        time.sleep(POLL_SECONDS)
        reap()
    reap()


@dataclasses.dataclass(kw_only=True)
class Supervisor:
    """Runs one command; ends it, and all that it started, when asked to or when the parent is gone."""

    command: list[str]
    pipe_fd: int
    parent: int
    grace: float
    remove_files: str | None
    folder: str | None = None
    files: set[str] = dataclasses.field(default_factory=set)
    pids: set[int] = dataclasses.field(default_factory=set)
    signals: list[int] = dataclasses.field(default_factory=list)
    exit_code: int | None = None
    child: int = 0
    starter: Process | None = None

    def run(self) -> int:
        """Supervise until nothing is left; returns the exit code: 128 + n for signal n, 127 if it did not start."""
        become_subreaper()
        self.starter = find_process(self.parent)
        wakeup = self._install_signals()
        try:
            self.child = self._spawn()
        except OSError as error:
            print(f"cannot start {self.command[0]}: {error}", file=sys.stderr, flush=True)
            return 127
        self._wait(wakeup)
        self._note_tree()
        if self.exit_code is None:
            self._ask_command_to_end()
        end_descendants(self.grace, reap=self._reap, hurry=self._hurry)
        for path in self.files:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        if self.folder is not None:
            import shutil  # here, as whoever starts a supervisor waits for its imports

            shutil.rmtree(self.folder, ignore_errors=True)
        remove_torch_memory(self.pids)
        return self.exit_code if self.exit_code is not None else 1

    def _install_signals(self) -> int:
        """Record signals, and make them wake who polls; returns the descriptor to poll."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        os.set_blocking(read_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, KILL_SIGNAL):
            signal.signal(signum, lambda received, _frame: self.signals.append(received))
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        return read_end

    def _spawn(self) -> int:
        """Start the command; returns its process id."""
        # This process has one thread, so here the parent-death signal does follow the process. It asks the command
        # to end if somebody kills the supervisor; a subreaper above (`under_supervisor`) then ends the rest.
        ask = functools.partial(_prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        # The object is kept: when it is dropped, it reaps a command that has already ended, and its exit code is lost.
        self.process = subprocess.Popen(self.command, preexec_fn=ask)
        return self.process.pid

    def _wait(self, wakeup: int) -> None:
        """Until the command ends, a signal comes, or the parent has written to the pipe, closed it or is gone."""
        events = select.poll()  # `select` takes no descriptor above 1023, and a parent with many requests has such
        for descriptor in (self.pipe_fd, wakeup):
            events.register(descriptor, select.POLLIN)
        while True:
            self._reap()
            if self.exit_code is not None or self.signals or self._is_orphan():
                return
            self._note_tree()  # before the end, for a process that was killed has no pid and no open files any more
            ready = {descriptor for descriptor, _ in events.poll(1000.0 * PARENT_CHECK_SECONDS)}
            if wakeup in ready:
                os.read(wakeup, 4096)
            if self.pipe_fd in ready:
                return

    def _is_orphan(self) -> bool:
        """Whether who asked for the command is gone, which need not be the parent: see `forking`."""
        now = find_process(self.parent)
        return now is None or not now.alive or now != self.starter

    def _note_tree(self) -> None:
        """Remember who is in the tree now, and, until there is one, which files to remove it has open."""
        tree = descendants(os.getpid())
        self.pids.update(process.pid for process in tree)
        if self.remove_files is not None and not self.files:
            paths = (path for process in tree for path in open_files(process.pid))
            self.files.update(path for path in paths if path.startswith(self.remove_files))

    def _ask_command_to_end(self) -> None:
        """Let the command close its own children in order before everybody gets a signal."""
        if self._hurry():
            return
        if (process := find_process(self.child)) is not None:
            send_signal(process, self.signals[0] if self.signals else signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while self.exit_code is None and time.monotonic() < deadline and not self._hurry():
            time.sleep(POLL_SECONDS)
            self._reap()

    def _hurry(self) -> bool:
        return len(self.signals) > 1 or KILL_SIGNAL in self.signals

    def _reap(self) -> None:
        for pid, status in ended_children():
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code


if __name__ == "__main__":
    settings, *words = sys.argv[1:]
    sys.exit(Supervisor(command=words, **json.loads(settings)).run())
