"""Starting a command by forking a process that has imported what it needs: the side of who asks. See `forking`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_rollout.supervise import forking, reaper

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 300.0  # the imports may have only begun
KILLED = -int(signal.SIGKILL)


class Forked:
    """A supervisor that was forked; methods as of `subprocess.Popen`. Made by :func:`fork`.

    This process is not its parent. It ends where the pipe ``status`` does, into which it writes its exit code first.
    """

    def __init__(self, pid: int, status: io.FileIO, command: Sequence[str]) -> None:
        self.pid = pid
        self._process = reaper.find_process(pid)
        self._status, self._said = status, b""
        self._code: int | None = None
        self._command = list(command)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code; -9 if it was killed; ``None`` while it runs."""
        with self._lock:
            while self._code is None and self._readable(0.0):
                if part := self._status.read(64):
                    self._said += part
                else:
                    self._wait_until_gone()
                    self._code = int(self._said or KILLED)
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if not self._readable(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process is not None:
            reaper.send_signal(self._process, signum)

    def _wait_until_gone(self) -> None:
        """A process closes its files a moment before it has ended, and longer before on a busy machine."""
        while (now := reaper.find_process(self.pid)) is not None and now.alive and now == self._process:
            time.sleep(reaper.POLL_SECONDS)

    def _readable(self, seconds: float | None) -> bool:
        events = select.poll()
        events.register(self._status, select.POLLIN)
        return bool(events.poll(None if seconds is None else 1000.0 * seconds))


def fork(
    address: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
    pipe: int,
    log: int,
) -> Forked | None:
    """Have the process at ``address`` fork a supervisor and its command; ``None``, with a line in the log, if it can't.

    ``settings`` are of `reaper.Supervisor`, which reads from ``pipe``; all output goes to ``log``.
    """
    request = {
        "command": list(command),
        "environment": dict(environment),
        "directory": os.getcwd(),  # noqa: PTH109
        "settings": dict(settings),
    }
    read_end, write_end = os.pipe()
    status = io.FileIO(read_end)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"\0{address}")
            forking.check_user(connection)
            text = json.dumps(request).encode()
            socket.send_fds(connection, [forking.LENGTH.pack(len(text))], [pipe, write_end, log])
            connection.sendall(text)
            said = json.loads(connection.makefile("rb").read())
    except (OSError, ValueError) as error:
        said = {"refused": f"it does not answer: {error}"}
    finally:
        os.close(write_end)
    if "pid" in said:
        return Forked(said["pid"], status, command)
    status.close()
    logger.warning("%s is started, not forked from the process that has its imports: %s", command[0], said["refused"])
    return None


@contextlib.contextmanager
def template(python: str, prepare: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Have a process run ``prepare``, to be forked for the length of the block; gives its address.

    Nothing is waited for, and who asks it finds out whether it works. It has to be started from the main thread: it
    ends with the thread that started it. ``prepare`` imports, in the interpreter ``python``, what commands do.
    """
    address = f"slime-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        process = subprocess.Popen(
            [python, "-P", forking.__file__, str(listener.fileno()), str(os.getpid()), prepare],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )
    try:
        yield address
    finally:
        process.kill()  # it has nothing to save, and it may be stopped
        process.wait()
