"""The directory of a running or interrupted conversion: ``.NAME.partial`` next to the output ``NAME``.

It holds ``conversion.json`` (what is converted), ``files`` (names of all files created in the output), ``output/``
(what will be renamed to ``NAME``) and ``lock`` (held by the process that writes). It appears whole, by renaming. A
directory of that name without such a record is not ours, neither used nor removed. Only listed files are removed.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_convert.errors import OutputError, UnfinishedError
from slime_convert.files import open_file

PROGRAM = "slime-convert"
_RECORD, _FILES, _OUTPUT, _LOCK = "conversion.json", "files", "output", "lock"
_DEPTH = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What is converted: two that are equal write the same bytes.

    Attributes:
        inputs: Files and directories that are read.
        options: Whatever else the bytes of the output depend on, as plain JSON.
        begun: When, by :func:`time.monotonic`.
    """

    command: str
    inputs: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic, compare=False)

    def record(self) -> dict[str, Any]:
        """The record that is kept next to the output, with size and time of each input file."""
        files = {file for path in self.inputs for file in _files(path.resolve())}
        stats = {str(file): file.stat() for file in sorted(files)}
        return {
            "program": PROGRAM,
            "version": version(),
            "command": self.command,
            "options": json.loads(json.dumps(self.options)),
            "inputs": {name: [found.st_size, found.st_mtime_ns] for name, found in stats.items()},
        }


def version() -> str | None:
    """This package's version; ``None`` if it is not installed, as it need not be."""
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files(path: Path) -> list[Path]:
    """A file, or the files of a directory except those in hidden directories, such as unfinished outputs."""
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for root, directories, names in os.walk(path):
        # A checkpoint's files lie two directories deep at most; many other files may lie in deeper ones.
        deep = len(Path(root).relative_to(path).parts) >= _DEPTH
        directories[:] = [name for name in directories if not name.startswith(".") and not deep]
        found += filter(Path.is_file, (Path(root, name) for name in names))
    return found


class Partial:
    """The unfinished output of one conversion, locked against other processes until it is closed.

    Args:
        target: Where the output will be. Its parent must exist.
        record: What is converted, for a new directory.

    Raises:
        OutputError: Another process writes it, or something else is in its place.
        OSError: It cannot be written.
    """

    def __init__(self, target: Path, record: Mapping[str, Any]) -> None:
        self.path = partial_path(target)
        self.earlier = self.path / "earlier"  # an output that is being replaced
        self._lock = self._acquire(target, record)

    @property
    def output(self) -> Path:
        """The directory to be filled, which will be renamed."""
        return self.path / _OUTPUT

    @property
    def was_renamed(self) -> bool:
        """Whether the output is in its place, and a process was killed before it could tidy up."""
        return not os.path.lexists(self.output)

    def begin(self, record: Mapping[str, Any]) -> None:
        """Keep what an earlier run of the same conversion left; remove what another conversion left."""
        if not self.was_renamed:
            self.refuse_others()
            if _read_record(self.path) == dict(record):
                return
            if self._created():
                what = "another conversion (other inputs, options or version) that was interrupted"
                _log.warning("%s holds %s; it is removed, and this one begins from the start", self.path, what)
        self._remove_output()
        (self.path / _FILES).write_text("")
        _write_record(self.path, record)
        self.output.mkdir()

    def create(self, *names: str) -> list[Path]:
        """List files that are about to be created in the output, make their directories, and return their paths."""
        known = set(self._created())
        for name in names:
            if name not in known and os.path.lexists(self.output / name):
                raise _foreign(self.output / name)
        with (self.path / _FILES).open("a", encoding="utf-8") as listed:
            # The line break goes first: a kill may have cut the last line off.
            listed.writelines("\n" + json.dumps(name) for name in names if name not in known)
        paths = [self.output / name for name in names]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        return paths

    def refuse_others(self) -> None:
        """Refuse to go on if there is anything in the output that was not created by :meth:`create`."""
        created = set(self._created())
        for path in self.output.rglob("*"):
            mode = path.lstat().st_mode
            is_ours = stat.S_ISREG(mode) and str(path.relative_to(self.output)) in created
            if not is_ours and not stat.S_ISDIR(mode):
                raise _foreign(path)

    def write(self, name: str, data: bytes) -> None:
        """Create a small file in the output."""
        (path,) = self.create(name)
        path.write_bytes(data)

    def remove(self) -> None:
        """Remove the whole directory, or warn if that fails."""
        if not _is_of(self._lock, self.path):  # removed already, and it may be another process's by now
            return
        try:
            self._remove_output()
            remove_files(self.path, (), _FILES, _RECORD, _LOCK)  # nothing but these may be there
            # Under another name first: a half of it would be in the way of the next run.
            going = Path(tempfile.mkdtemp(prefix=f".{PROGRAM}-", dir=self.path.parent))
            self.path.rename(going)
            _discard(going)
        except OSError as error:
            _log.warning("%s is no longer needed, but cannot be removed (%s); delete it", self.path, error)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)

    def _remove_output(self) -> None:
        if not self.was_renamed:
            remove_files(self.output, self._created())
            self.output.rmdir()

    def _created(self) -> list[str]:
        """Names of the files that were created in the output."""
        names = []
        for line in (self.path / _FILES).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # cut off by a kill, before the file was created
                names.append(str(json.loads(line)))
        return names

    def _acquire(self, target: Path, record: Mapping[str, Any]) -> int:
        """The lock of the directory, which is made if it is missing."""
        while True:
            if not os.path.lexists(self.path):
                self._make(record)
            try:
                _refuse_foreign(self.path)
                descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # another process removed the directory just now
                continue
            if self._is_locked(descriptor, target):
                return descriptor

    def _is_locked(self, descriptor: int, target: Path) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            advice = "wait until it has ended, or choose another directory"
            raise OutputError(f"another process is writing {target}; {advice}") from None
        except OSError as error:
            # A file system without locks: there, nothing but the user's care keeps two processes apart.
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                os.close(descriptor)
                raise
            _log.warning("%s cannot be locked (%s); run no second conversion into %s", self.path, error, target)
        # The lock may have been removed, by the process that had it, between the opening and the locking.
        if _is_of(descriptor, self.path):
            return True
        os.close(descriptor)
        return False

    def _make(self, record: Mapping[str, Any]) -> None:
        """Make the directory, whole, under another name first."""
        made = Path(tempfile.mkdtemp(prefix=f".{PROGRAM}-", dir=self.path.parent))
        try:
            _write_record(made, record)
            for name in (_LOCK, _FILES):
                (made / name).touch()
            (made / _OUTPUT).mkdir()
            if os.path.lexists(self.path):  # another process was faster
                raise FileExistsError(errno.EEXIST, "it exists", str(self.path))
            made.rename(self.path)
        except BaseException as error:
            _discard(made)
            if not isinstance(error, FileExistsError):
                raise


def _foreign(path: Path) -> OutputError:
    return OutputError(f"{path} was not made by slime-convert; move it elsewhere, and run the same command again")


def _discard(directory: Path) -> None:
    """Remove a directory of ours that holds no converted file."""
    for name in (_RECORD, f"{_RECORD}.new", _LOCK, _FILES):
        (directory / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (directory / _OUTPUT).rmdir()
    directory.rmdir()


def partial_path(target: Path) -> Path:
    """Where the unfinished output of a target is."""
    return target.with_name(f".{target.name}.partial")


def _read_record(path: Path) -> dict[str, Any] | None:
    """The record in a directory of ours; ``None`` in any other."""
    try:
        with os.fdopen(open_file(path / _RECORD, os.O_NOFOLLOW), "rb") as file:
            record = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("program") == PROGRAM else None


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    begun = path / f"{_RECORD}.new"
    with begun.open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    begun.rename(path / _RECORD)


def _refuse_foreign(path: Path) -> None:
    """Refuse a place that is taken: by a link, a file, another user's directory, or one without our record."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or _read_record(path) is None:
        path.lstat()  # an error if it was removed just now
        advice = "move it elsewhere, or choose another directory"
        raise OutputError(f"{path} was not made by this version of slime-convert; {advice}")


def _is_of(descriptor: int, directory: Path) -> bool:
    """Whether an open lock is the one that a directory has now."""
    try:
        return (directory / _LOCK).stat(follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def remove_files(directory: Path, names: Iterable[str], *kept: str) -> None:
    """Remove files of a directory, and empty directories in it; an OSError if then more than ``kept`` is left."""
    parents = set()
    for path in (directory / name for name in names):
        path.unlink(missing_ok=True)
        parents |= {parent for parent in path.parents if parent != directory and parent.is_relative_to(directory)}
    remove_empty(sorted(parents, key=lambda parent: -len(parent.parts)))
    if others := {path.name for path in directory.iterdir()} - set(kept):
        raise OSError(errno.ENOTEMPTY, f"not empty, it holds {min(others)}")


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove those of some directories that are empty, in their order."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


def refuse_unfinished(path: str | Path) -> None:
    """Raise an :class:`UnfinishedError` if a path is, or lies in, the output of a running or interrupted conversion."""
    place = Path(path).resolve()
    for directory in (place, *place.parents[:3]):
        name = directory.name
        if name.startswith(".") and name.endswith(".partial") and (directory / _LOCK).is_file():
            target = directory.with_name(name.removeprefix(".").removesuffix(".partial"))
            raise UnfinishedError(
                f"{path} is unfinished: a conversion into {target} is running or was interrupted; "
                "run it again to finish it, and use what it writes then"
            )
