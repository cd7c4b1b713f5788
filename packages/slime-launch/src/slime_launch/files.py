"""A directory that one run uses at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from slime_launch.errors import ManifestError

LOCK = "run.lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system says that has no locks, as some of clusters have not; a run there goes without."""
LOCK_SECONDS = 20.0  # longer than what is left of a killed run takes to end


@contextlib.contextmanager
def locked(directory: Path, *, check: Callable[[], None], seconds: float | None = None) -> Iterator[None]:
    """Have a run's directory alone until the block ends, or the process, however it ends.

    Args:
        directory: Is made if it is not there, and removed at the end if nothing but the lock was put into it.
        check: Called while waiting for another run to end; may raise.
        seconds: Longest wait; ``None`` means 20.

    Raises:
        ManifestError: Another run uses the directory.
    """
    is_new, deadline = not directory.exists(), time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
    while (file := _try_to_lock(directory / LOCK)) is None:
        if time.monotonic() > deadline:
            user = (directory / LOCK).read_text(encoding="utf-8").strip() if (directory / LOCK).exists() else "ending"
            raise ManifestError(
                f"--save {directory} is in use by another run ({user}); stop it, or give another --save"
            )
        check()
        time.sleep(0.1)
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # what it holds is gone already, or cannot be looked at
                if is_new and [path.name for path in directory.iterdir()] == [LOCK]:
                    (directory / LOCK).unlink()
                    directory.rmdir()


def _try_to_lock(path: Path) -> TextIO | None:
    """The file, open and locked; ``None`` if another process has it, or has just removed it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError, FileNotFoundError):
        file = stack.enter_context(path.open("a+", encoding="utf-8"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            stack.pop_all()  # stays open
            return file
    return None
