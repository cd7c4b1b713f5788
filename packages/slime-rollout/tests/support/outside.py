"""What is around a sandbox, for `escapes.py`: it is made for a test, and says what of it is not as it was."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import resource
import secrets
import select
import signal
import socket
import stat
import subprocess
import termios
import tty
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.shmat.restype = ctypes.c_void_p
_SHMGET, _SHMCTL, _SEMGET, _SEMCTL, _MSGGET, _MSGCTL, _MQ_UNLINK, _IOPRIO_GET = 29, 31, 64, 66, 68, 71, 241, 252
_CREATE, _GET_FLAGS = 0o1000, 0x80086601
_ATTRIBUTES_OF_A_FILE = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_mtime_ns", "st_ctime_ns")


class Outside:
    """What is around a sandbox, made for a test: files, a process, a terminal, sockets, shared memory.

    Attributes:
        folder: Holds ``mine``, the file with the secret.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._secret, self._mark = f"secret-{secrets.token_hex(8)}", secrets.token_hex(7)
        self._key = 1 + secrets.randbelow(1 << 30)
        with contextlib.ExitStack() as stack:
            self._make_files(stack)
            self._make_process(stack)
            self._make_terminal(stack)
            self._make_sockets(stack)
            self._make_shared(stack)
            self._stack = stack.pop_all()
        self._stayed: list[int] = []
        self._before = self._state()

    def close(self) -> None:
        """End and remove everything, what an escape has made as well."""
        for pid in self._stayed:
            os.kill(pid, signal.SIGKILL)
        self._stack.close()

    def names(self) -> dict[str, object]:
        """What programs know of it."""
        return {
            "FOLDER": str(self.folder), "FILE": str(self._file), "PID": self._process.pid, "MARK": self._mark,
            "KEY": self._key, "TERMINAL": os.ttyname(self._slave), "PTS": Path("/dev/pts").stat().st_dev,
            "TCP": self._sockets["tcp"].getsockname()[1], "UDP": self._sockets["udp"].getsockname()[1],
            "CPUS": os.sched_getaffinity(0),
            "DISKS": [str(path) for path in Path("/dev").iterdir() if stat.S_ISBLK(path.stat().st_mode)],
        }  # fmt: skip

    def secret_is_in(self, text: str) -> bool:
        """Whether somebody has read the file, the process's environment or the shared memory."""
        return self._secret in text

    def changes(self) -> list[str]:
        """What is not as it was."""
        self._stayed, now = self._staying(), self._state()
        changed = [name for name, before in self._before.items() if now[name] != before]
        return changed + ["a process that stays"] * bool(self._stayed)

    def _make_files(self, stack: contextlib.ExitStack) -> None:
        self._file = self.folder / "mine"
        self._file.write_text(self._secret)
        (self.folder / "empty").mkdir()
        with contextlib.suppress(OSError):  # a file system without them
            os.setxattr(self._file, "user.kept", b"kept")
        inherited = os.open(self._file, os.O_RDONLY)
        stack.callback(os.close, inherited)
        os.set_inheritable(inherited, True)
        os.environ[f"ESCAPES_{self._mark}"] = self._secret
        stack.callback(os.environ.pop, f"ESCAPES_{self._mark}")

    def _make_process(self, stack: contextlib.ExitStack) -> None:
        with self._file.open("rb") as errors:
            self._process = stack.enter_context(
                subprocess.Popen(
                    ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=self.folder,
                    start_new_session=True, bufsize=0,
                )
            )  # fmt: skip
        stack.callback(self._process.kill)
        self._answers()  # it is there

    def _make_terminal(self, stack: contextlib.ExitStack) -> None:
        self._master, self._slave = pty.openpty()
        stack.callback(os.close, self._master)
        stack.callback(os.close, self._slave)
        tty.setraw(self._slave)

    def _make_sockets(self, stack: contextlib.ExitStack) -> None:
        self._sockets = {}
        for name, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("unix", socket.AF_UNIX, socket.SOCK_STREAM, str(self.folder / "socket")),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self._mark}"),
        ):
            self._sockets[name] = stack.enter_context(socket.socket(family, kind))
            self._sockets[name].bind(address)
            if kind == socket.SOCK_STREAM:
                self._sockets[name].listen()

    def _make_shared(self, stack: contextlib.ExitStack) -> None:
        segment = _LIBC.syscall(_SHMGET, self._key, 4096, _CREATE | 0o600)
        assert segment >= 0
        stack.callback(_LIBC.syscall, _SHMCTL, segment, 0, None)
        self._shared = ctypes.c_void_p(_LIBC.shmat(segment, None, 0))
        stack.callback(_LIBC.shmdt, self._shared)
        ctypes.memmove(self._shared, self._secret.encode(), len(self._secret))
        self._posix = Path("/dev/shm", self._mark)
        self._posix.write_text(self._secret)
        for path in (self._posix, self._posix.with_name(f"{self._mark}-new")):
            stack.callback(path.unlink, missing_ok=True)

    def _answers(self) -> bool:
        """Whether the process does, after all signals that are pending."""
        try:
            self._process.stdin.write(b"\n")
        except BrokenPipeError:
            return False
        return self._process.stdout.read(1) == b"\n"

    def _staying(self) -> list[int]:
        """Processes that have the mark as their name."""
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and (process / "comm").read_text().strip() == self._mark:
                    found.append(int(process.name))
        return found

    def _state(self) -> dict[str, object]:
        pid, file = self._process.pid, self._file
        ready = select.select([self._master, self._slave, *self._sockets.values()], [], [], 0)[0]
        looks: dict[str, Callable[[], object]] = {
            "process": self._answers,
            "priority": lambda: os.getpriority(os.PRIO_PROCESS, pid),
            "I/O priority": lambda: _LIBC.syscall(_IOPRIO_GET, 1, pid),
            "scheduler": lambda: os.sched_getscheduler(pid),
            "limits": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
            "oom_score_adj": Path(f"/proc/{pid}/oom_score_adj").read_text,
            "file": file.read_text,
            "attributes": lambda: [getattr(file.stat(), name) for name in _ATTRIBUTES_OF_A_FILE],
            "extended attributes": lambda: os.listxattr(file),
            "flags": lambda: _flags(file),
            "folder": lambda: sorted(path.name for path in self.folder.iterdir()),
            "terminal": lambda: (
                termios.tcgetattr(self._slave),
                fcntl.ioctl(self._slave, termios.TIOCGWINSZ, bytes(8)),
            ),
            "typed or shown": lambda: [end in ready for end in (self._master, self._slave)],
            "SysV memory": lambda: ctypes.string_at(self._shared.value),
            "POSIX memory": lambda: [path.read_text() for path in sorted(Path("/dev/shm").glob(f"{self._mark}*"))],
            "SysV semaphores": lambda: self._removed(_SEMGET, _SEMCTL),
            "SysV messages": lambda: self._removed(_MSGGET, _MSGCTL),
            "POSIX messages": lambda: _LIBC.syscall(_MQ_UNLINK, self._mark.encode()),
            **{name: lambda end=end: end in ready for name, end in self._sockets.items()},
        }
        return {name: _seen(look) for name, look in looks.items()}

    def _removed(self, get: int, control: int) -> bool:
        """Whether an object of the key was there; it is removed."""
        found = _LIBC.syscall(get, self._key, 0, 0)
        return found >= 0 and _LIBC.syscall(control, found, 0, 0, None) == 0


def _seen(look: Callable[[], object]) -> object:
    try:
        return look()
    except OSError as error:
        return repr(error)


def _flags(file: Path) -> bytes:
    with file.open("rb") as opened:
        return fcntl.ioctl(opened, _GET_FLAGS, bytes(8))
