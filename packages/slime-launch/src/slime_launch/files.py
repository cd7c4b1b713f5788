"""Small files that are either whole or not there, and a directory that one run uses at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slime_launch.errors import ManifestError

LOCK = "run.lock"
LOCK_SECONDS = 20.0  # longer than what is left of a killed run takes to end


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds either the old one or this one, even after a power cut.

    Args:
        path: The file; its directory must exist. One process writes to it at a time.
        text: All that it holds.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # a rename is data of the directory
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(directory: Path, *, check: Callable[[], None], seconds: float | None = None) -> Iterator[None]:
    """Have a run's directory alone until the block ends, or the process, however it ends.

    Args:
        directory: Is made if it is not there. The lock's file stays in it.
        check: Called while waiting for another run to end; may raise.
        seconds: Longest wait; ``None`` means 20.

    Raises:
        ManifestError: Another run uses the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with path.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ManifestError(
                        f"--save {directory} is in use by another run ({path.read_text().strip()}); stop it, or give "
                        "another --save"
                    ) from None
            check()
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
