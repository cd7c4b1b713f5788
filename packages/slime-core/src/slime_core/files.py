"""Files that appear whole or not at all, even after a power failure, and files that may be somebody else's.

Nothing is written by way of a link that somebody planted, and nothing is read that has no end.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from slime_core.errors import DamagedError, DataError

MOST_BYTES = 2**29
"""Of a file that is read whole."""
MOST_WRITTEN = 2**19
"""Of a file that people write by hand, as YAML, which takes long to read."""
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError)
"""All that code raises which expects a file to hold what its writer would have written."""
_SUFFIX = ".partial"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds either the old one or this one. One process writes to it at a time."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes the file ``path`` at the end of the block; a link of that name is replaced.

    Raises:
        OSError: It cannot be written; ``filename`` is ``path``.
    """
    try:
        _remove_left(path)
        partial = _new_file(path)
    except OSError as error:
        error.filename = str(path)
        raise
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)  # a rename is data of the directory


def _new_file(path: Path) -> Path:
    """An empty file beside ``path`` whose name nobody can know before: whatever has a name already may be a link."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))  # the umask decides
    return partial


def _remove_left(path: Path) -> None:
    """Remove what writers of ``path`` that were killed have left."""
    left = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")  # not of a file `NAME.more`
    for name in os.listdir(path.parent):  # noqa: PTH208  (quick also beside thousands of files)
        if left.fullmatch(name):
            with contextlib.suppress(OSError):
                path.with_name(name).unlink()


def sync(path: Path) -> None:
    """Wait until a file or a directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_to_append(path: Path) -> TextIO:
    """A file of text, open to be added to; made if it is not there.

    Raises:
        DataError: It is a link, a pipe or a device: in a folder that was somebody else's it may lead anywhere.
        OSError: It cannot be opened.
    """
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(_regular(path, how, "nothing is added to it"), "a", encoding="utf-8")


def open_file(path: Path) -> BinaryIO:
    """A file, open to be read.

    Raises:
        DataError: It is not a regular file: a pipe would be waited for, and a device may have no end.
        OSError: It cannot be opened.
    """
    return os.fdopen(_regular(path, os.O_RDONLY, "it is not read"), "rb")


def _regular(path: Path, how: int, then: str) -> int:
    """The handle of a regular file; DataError for anything else."""
    said = f"{path} is not a regular file, so {then}; remove it"
    # A link that is not followed; a pipe that nobody reads, a socket, or /dev/tty of a process without a terminal.
    others = {errno.ENXIO, errno.ELOOP} if how & os.O_NOFOLLOW else {errno.ENXIO}
    try:
        handle = os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in others:
            raise
        raise DataError(said) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(said)
    return handle


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """A whole file.

    Raises:
        DataError: It is not a regular file, or has more than ``most`` bytes.
        OSError: It cannot be read.
    """
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise DataError(f"{path} has {size:,} bytes; at most {most:,} are read")
        return file.read(size)


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """A whole file of UTF-8; raises as :func:`read_bytes`, and UnicodeDecodeError, a ValueError."""
    return read_bytes(path, most=most).decode("utf-8")


def read_json(path: Path, *, most: int = MOST_BYTES) -> Any:
    """The value in a file of JSON; raises as :func:`read_bytes`, and ValueError for anything else."""
    try:
        return json.loads(read_bytes(path, most=most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def naming_damage(where: str | Path, advice: str = "get it again") -> Iterator[None]:
    """Within the block, what the content of a file makes code raise is a DamagedError that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = str(error).partition("\n")[0][:200]
        raise DamagedError(f"{where} is damaged ({type(error).__name__}: {reason}); {advice}") from error


def read_gzip(path: Path, *, most: int) -> bytes:
    """The unpacked contents of a file, at most ``most`` bytes; raises as :func:`read_bytes` and :mod:`gzip`."""
    with open_file(path) as file, gzip.open(file) as packed:  # noqa: TID251  (limited below)
        content = packed.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path} unpacks to more than {most:,} bytes, so it is not read; remove it")
    return content
