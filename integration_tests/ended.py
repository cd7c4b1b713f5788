"""A run that is ended in one way or another while somebody watches, and what is left of it then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from launching import listening, rows, shared_memory, started, tree, wait_for, wait_until_gone

GONE_SECONDS = 120.0  # on a machine that is slow and busy; a quiet one takes a few
FOREVER = 100_000  # rollouts

End = Callable[[list[psutil.Process]], None]
"""Ends a run, given all of its processes, the topmost first."""


@dataclass(frozen=True)
class Ended:
    """What was seen of a run that has ended.

    Attributes:
        work: Its directory.
        text: What it printed.
        code: Its exit code.
        processes: How many it had.
        left: Those that were there still after `GONE_SECONDS`.
        listening: Command, address and port of every TCP socket that it listened on.
        memory: Names of the files in /dev/shm that it had.
        memory_left: Those that were there still.
        bystander_lives: Whether a process of somebody else's that looks like one of the run's was left alone.
    """

    work: Path
    text: str
    code: int
    processes: int
    left: list[str]
    listening: set[tuple[str, str, int]]
    memory: list[str]
    memory_left: list[str]
    bystander_lives: bool


def trained(work: Path, steps: int) -> Callable[[], bool]:
    """Whether a run has made so many optimizer steps, as a question to ask again and again."""
    return lambda: len(rows(work, "train")) >= steps


def end_run(command: list[str], work: Path, end: End, *, ready: Callable[[], bool], log: str = "log.txt") -> Ended:
    """Start a run, end it when it is ready, and wait for everything of it to be gone.

    Args:
        command: The launcher's command line.
        work: The run's directory.
        end: What ends it.
        ready: When to do that.
        log: Name of the file that gets what it prints.
    """
    path = work / log
    with _bystander() as bystander, started(command, path) as process:
        wait_for(ready, "the moment to end the run", process=process, log=path)
        family = tree(process)
        memory, sockets = shared_memory(family), listening(family)
        end(family)
        code = process.wait(GONE_SECONDS)
        left = wait_until_gone(family, GONE_SECONDS)
        return Ended(
            work=work,
            text=path.read_text(errors="replace"),
            code=code,
            processes=len(family),
            left=left,
            listening=sockets,
            memory=[file.name for file in memory],
            memory_left=[file.name for file in memory if file.exists()],
            bystander_lives=bystander.poll() is None,
        )


def finish(family: list[psutil.Process]) -> None:
    """Let the run end by itself."""


def send(number: int) -> End:
    """Send the run's topmost process a signal."""
    return lambda family: family[0].send_signal(number)


def kill_one(*words: str) -> End:
    """Kill the last process of the run whose command line holds all of the words."""

    def kill(family: list[psutil.Process]) -> None:
        lines = {process: " ".join(process.cmdline()) for process in family[1:]}
        found = [process for process, line in lines.items() if all(word in line for word in words)]
        assert found, f"no process with {words} among {list(lines.values())}"
        found[-1].kill()

    return kill


@contextmanager
def _bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else's that looks like one of ours."""
    process = subprocess.Popen([sys.executable, "-c", "input('sglang ray slime router')"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
