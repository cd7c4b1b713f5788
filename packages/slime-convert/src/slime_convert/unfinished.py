"""The directory of a conversion that is under way, or was interrupted: ``.NAME.partial`` beside the output ``NAME``.

In it lie ``conversion.json`` (what is being converted), ``output/`` (what will be renamed to ``NAME``), ``state/``
(what is known of finished files) and ``lock`` (held by the process that writes; the first to come and the last to go).
An earlier output that is being replaced is ``.NAME.old`` between two renamings. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import OutputError, UnfinishedError

_RECORD, _OUTPUT, _STATE, _LOCK = "conversion.json", "output", "state", "lock"
_REPLACED = "replaced"  # an earlier output that is being removed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What is converted: two that are equal write the same bytes.

    Attributes:
        command: What is done.
        inputs: Files and directories that are read.
        options: Whatever else the bytes of the output depend on, as plain JSON.
    """

    command: str
    inputs: tuple[Path, ...]
    options: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """As it is kept beside the output: with size and time of each input file."""
        versions = {name: _version(name) for name in ("slime-convert", "torch", "mbridge", "megatron-core")}
        files = {file for path in self.inputs for file in _files(path.resolve())}
        stats = {str(file): file.stat() for file in sorted(files)}
        return {
            "command": self.command,
            "versions": versions,
            "options": json.loads(json.dumps(self.options)),
            "inputs": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        }


def _version(name: str) -> str | None:
    """A package's version; ``None`` for one that is not installed, as this one need not be."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files(path: Path) -> list[Path]:
    """A file, or the files of a directory but those in hidden directories, such as unfinished outputs."""
    if not path.is_dir():
        return [path]
    found = []
    for root, directories, names in os.walk(path):
        directories[:] = [name for name in directories if not name.startswith(".")]
        found += [file for file in (Path(root, name) for name in names) if file.is_file()]
    return found


class Unfinished:
    """The unfinished output of one conversion, locked against other processes until it is closed.

    Args:
        target: Where the output will be. Its parent must exist.

    Raises:
        OutputError: Another process writes it.
        OSError: It cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{target.name}.partial")
        self.aside = target.with_name(f".{target.name}.old")
        self._lock = _lock(self.path, target)

    @property
    def output(self) -> Path:
        """The directory to be filled, which will be renamed."""
        return self.path / _OUTPUT

    @property
    def state(self) -> Path:
        """A directory for what is known of finished files."""
        return self.path / _STATE

    @property
    def exists(self) -> bool:
        """Whether an earlier conversion left something."""
        return (self.path / _RECORD).is_file() and self.output.is_dir()

    @property
    def was_renamed(self) -> bool:
        """Whether the output is in its place, and a process was killed before it could tidy up."""
        return (self.path / _RECORD).is_file() and not self.output.exists()

    def is_of(self, record: Mapping[str, Any]) -> bool:
        """Whether what an earlier conversion left is of the same one."""
        try:
            return self.exists and json.loads((self.path / _RECORD).read_text(encoding="utf-8")) == record
        except (OSError, ValueError):  # the power may have failed while it was written
            return False

    def begin(self, record: Mapping[str, Any]) -> None:
        """Begin anew: whatever an earlier conversion left is removed."""
        self.clear()
        self.state.mkdir()
        self.output.mkdir()
        begun = self.path / "record"
        begun.write_text(json.dumps(record, indent=2), encoding="utf-8")
        begun.rename(self.path / _RECORD)

    def discard(self) -> None:
        """Take the earlier output, which was set aside, for removal: a part of it must not pass for the whole."""
        self.aside.rename(self.path / _REPLACED)

    def remove(self) -> None:
        """Remove all of it; what cannot be removed is told."""
        if not _is_of(self._lock, self.path):  # removed already, and it may be another process's by now
            return
        try:
            self.clear()
        except OSError as error:
            _log.warning("%s is of no use any more, but cannot be removed (%s); delete it", self.path, error)
            return
        with suppress(OSError):
            (self.path / _LOCK).unlink()
            # Unless another process has put its lock there meanwhile.
            self.path.rmdir()

    def close(self) -> None:
        """Give the lock back. What is of no use for the next run is removed."""
        with suppress(OSError):  # what is there cannot be told, so it stays
            if not self.exists and not (self.was_renamed and self.aside.exists()):
                self.remove()
        os.close(self._lock)

    def clear(self) -> None:
        """Remove all but the lock."""
        # The record first: without it, what is left counts for nothing.
        (self.path / _RECORD).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()


def _lock(directory: Path, target: Path) -> int:
    """Open and lock the file of an unfinished output's lock; the lock ends with the process if nothing else ends it."""
    while True:
        directory.mkdir(exist_ok=True)
        try:
            descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process removed the directory just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another process is writing {target}; wait until it has ended, or choose another directory"
            ) from None
        except OSError as error:
            # A file system without locks: there, nothing but the user's care keeps two processes apart.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                os.close(descriptor)
                raise
            _log.warning("%s cannot be locked (%s); run no second conversion into %s", directory, error, target)
        # The lock may have been removed, by the process that had it, between the opening and the locking.
        if _is_of(descriptor, directory):
            return descriptor
        os.close(descriptor)


def _is_of(descriptor: int, directory: Path) -> bool:
    """Whether an open lock is the one that a directory has now."""
    try:
        return (directory / _LOCK).stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def refuse_unfinished(path: str | Path) -> None:
    """Refuse a directory in which a conversion is under way or was interrupted.

    Args:
        path: The directory itself, or one in it, such as one iteration of a checkpoint.

    Raises:
        UnfinishedError: It is such a directory.
    """
    place = Path(path).resolve()
    for directory in (place, *place.parents[:3]):
        name = directory.name
        if name.startswith(".") and name.endswith(".partial") and (directory / _LOCK).is_file():
            target = directory.with_name(name.removeprefix(".").removesuffix(".partial"))
            raise UnfinishedError(
                f"{path} is unfinished: a conversion into {target} is under way or was interrupted; "
                "run it again to finish it, and use what it writes then"
            )
