"""A process that has imported what commands need, and forks one for each that it is asked to start.

    starter ──socket──▶ this process ──fork──▶ supervisor ──fork──▶ command

What `Supervised` starts otherwise, an interpreter for the supervisor and one for the command, is forked here: the
imports of the command, seconds of SGLang's, are done already. Supervisor and command belong to who asked: its end of
the pipe, not this process, decides how long they live. This process ends with the one that started it.

It is run by its path, in the interpreter of the commands, so it uses the standard library only. `forked` is the other
side.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from slime_rollout.supervise import reaper
else:
    sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120
    import reaper

    del sys.path[0]  # where other files have names of packages

LENGTH = struct.Struct("!Q")
CREDENTIALS = struct.Struct("3i")  # pid, user and group of the other side of a socket
NUM_FILES = 3  # that come with a request: the supervisor's pipe, the pipe for the exit code, the log
IDLE_SECONDS = 1.0
REQUEST_SECONDS = 10.0  # for a request to arrive whole
# Variables that only count when a process starts, or while it imports: a request must have the same.
AT_START = (
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "LD_",
    "MALLOC_",
    "OMP_",
    "MKL_",
    "TORCH",
    "HF_",
    "SGLANG_",
    "SLIME_ENGINE_",
)
# SGLang reads the one when its ranks meet, torch the other when it compiles; a run's workers have it, its launcher not.
LATER = ("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "TORCHINDUCTOR_CACHE_DIR")


class ForkingSupervisor(reaper.Supervisor):
    """A supervisor whose command is forked from its own process."""

    def _spawn(self) -> int:
        pid = os.fork()
        if pid == 0:
            reaper._prctl(reaper.PR_SET_PDEATHSIG, signal.SIGTERM)
            os.close(signal.set_wakeup_fd(-1))
            for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, reaper.KILL_SIGNAL):
                signal.signal(signum, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise ForkedCommand
        return pid


class ForkedCommand(BaseException):
    """Raised in the process of the command, to leave everything that belongs to its supervisor."""


class Template:
    """The process that is forked."""

    def __init__(self, prepare: str) -> None:
        self.environment = dict(os.environ)  # that it was started with
        gc.disable()  # collecting garbage takes a fifth of the imports' time, and they make none
        names: dict[str, Any] = {}
        exec(compile(prepare, "<prepare>", "exec"), names)
        # Variables that its imports have set.
        self.imported = {name: value for name, value in os.environ.items() if self.environment.get(name) != value}
        self.name: Callable[[str], None] = names.get("setproctitle", lambda _title: None)  # names a process
        gc.freeze()
        gc.enable()

    def problem(self, request: dict[str, Any]) -> str | None:
        """Why a process that is forked from this one differs from one that is started; ``None`` if it does not."""
        if threading.active_count() > 1:
            return "its imports have started threads, which a forked process does not have"
        if request["command"][0] != sys.orig_argv[0]:
            return f"it runs in {sys.orig_argv[0]}"
        given, own = request["environment"], self.environment
        for name in sorted(name for name in {*given, *own} if name.startswith(AT_START) and name not in LATER):
            if given.get(name) != own.get(name):
                return f"it was started with {name}={own.get(name)}, not {given.get(name)}"
        return None

    def serve(self, listener: socket.socket, parent: int) -> list[str]:
        """Fork what is asked for, until ``parent`` is gone; returns only in a command's process, the command."""
        events = select.poll()
        events.register(listener, select.POLLIN)
        while os.getppid() == parent:
            list(reaper.ended_children())
            if not events.poll(1000.0 * IDLE_SECONDS):
                continue
            connection, _ = listener.accept()
            files: list[int] = []
            with connection, contextlib.suppress(OSError, ValueError):  # of a starter that is gone
                request = receive(connection, files)
                if refused := self.problem(request):
                    connection.sendall(json.dumps({"refused": refused}).encode())
                elif pid := os.fork():
                    connection.sendall(json.dumps({"pid": pid}).encode())
                else:
                    listener.close()
                    connection.close()
                    return self.supervise(request, files)
            for file in files:
                os.close(file)
        sys.exit(0)

    def supervise(self, request: dict[str, Any], files: list[int]) -> list[str]:
        """Be the supervisor of a request. Returns in the process of the command; the supervisor's own ends here."""
        command, (pipe, status, log) = request["command"], files
        code = 127
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.close(null)
            os.close(log)
            os.chdir(request["directory"])
            os.environ.clear()
            os.environ.update(request["environment"] | self.imported)
            tempfile.tempdir = None  # of the imports' environment
            self.name(" ".join(["reaper.py", *command]))
            code = ForkingSupervisor(command=command, pipe_fd=pipe, **request["settings"]).run()
        except ForkedCommand:
            os.close(pipe)
            os.close(status)
            self.name(" ".join(command))
            return list(command)
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(OSError):  # nobody waits for it
            os.write(status, str(code).encode())
        os._exit(0)


def receive(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """A request; adds its files to ``files``. `ValueError`: another user's, not whole, or its command was started."""
    connection.settimeout(REQUEST_SECONDS)
    check_user(connection)
    head, received, _, _ = socket.recv_fds(connection, LENGTH.size, NUM_FILES)
    files += received
    if len(head) != LENGTH.size or len(files) != NUM_FILES:
        raise ValueError("a request that was broken off")
    text = b""
    while len(text) < LENGTH.unpack(head)[0]:
        if not (part := connection.recv(1 << 16)):
            raise ValueError("a request that was broken off")
        text += part
    waiting = select.poll()
    waiting.register(connection, select.POLLRDHUP)
    if waiting.poll(0):
        raise ValueError("a request that was given up")
    return dict(json.loads(text))


def check_user(connection: socket.socket) -> None:
    """Raise `ValueError` if the other side is not this user's; anybody may know a socket's name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise ValueError("the other side is another user's process")


def run(command: list[str]) -> None:
    """Run ``python -P -m MODULE …`` or ``python -P FILE …``, as if this interpreter had been started so."""
    words = command[1:]
    if words[0] == "-P":
        del words[0]
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  (as the interpreter does it)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> list[str]:
    """Import, then fork; returns only in a command's process, the command."""
    number, parent, prepare = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    reaper._prctl(reaper.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before that was set
        sys.exit(0)
    with socket.socket(fileno=number) as listener:  # who asks meanwhile waits
        return Template(prepare).serve(listener, parent)


if __name__ == "__main__":
    command = main()
    run(command)
