"""The directory of a running or interrupted conversion: ``.NAME.partial`` next to the output ``NAME``.

It holds ``conversion.json`` (what is converted), ``files`` (names of all files created in the output), ``output/``
(what will be renamed to ``NAME``) and ``lock`` (held by the process that writes). It appears whole, by renaming. A
directory of that name without such a record, or with anything else in it, is not ours, neither used nor removed. Only
listed files are removed, and no link is followed.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from slime_convert.errors import CheckpointError, OutputError, UnfinishedError
from slime_convert.files import open_file

PROGRAM = "slime-convert"
_RECORD, _FILES, _OUTPUT, _LOCK, _EARLIER = "conversion.json", "files", "output", "lock", "earlier"
_SMALL = (_RECORD, _FILES, _LOCK, f"{_RECORD}.new", f"{_FILES}.new")
_DEPTH = 2
_READ = (".safetensors", "config.json", ".index.json", ".distcp", ".pt", ".metadata", ".gguf")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """A conversion's inputs and options: two that are equal write the same bytes.

    Attributes:
        inputs: Files and directories that are read. Made before they are, so that a change meanwhile is noticed.
        options: Whatever else the bytes of the output depend on, as plain JSON.
        begun: When, by :func:`time.monotonic`.
        stats: Size and times of each input file then.
    """

    command: str
    inputs: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic, compare=False)
    stats: Mapping[str, Sequence[int]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stats", self.stats or _stats(self.inputs))

    def also(self, path: Path) -> Conversion:
        """The same with one more input."""
        return replace(self, inputs=(*self.inputs, path), stats={**self.stats, **_stats((path,))})

    def changed_input(self) -> str | None:
        """The first input file that has another size or time than when this was made; only of those that matter."""
        now = _stats(self.inputs)
        # A training run may write its logs next to them. The third number also tells of a new link or owner.
        before = ((name, found) for name, found in self.stats.items() if name.endswith(_READ))
        return next((name for name, found in before if [*found[:2]] != [*now.get(name, ())[:2]]), None)

    def record(self) -> dict[str, Any]:
        """The record that is kept next to the output."""
        return {
            "program": PROGRAM,
            "version": version(),
            "command": self.command,
            "options": json.loads(json.dumps(self.options)),
            "inputs": self.stats,
        }


def version() -> str | None:
    """This package's version; ``None`` if it is not installed, as it need not be."""
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stats(inputs: Iterable[Path]) -> dict[str, list[int]]:
    """Size, time of the last change of the bytes, and of any change, of each file; not of files that are missing."""
    stats = {}
    for path in inputs:
        with suppress(OSError, RuntimeError, ValueError):  # whoever reads it says what is wrong
            for file in sorted(_files(path.resolve())):
                found = file.stat()
                stats[str(file)] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return stats


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

    The parent of ``target``, where the output will be, must exist.

    Raises:
        OutputError: Another process writes it, or something else is in its place.
        OSError: It cannot be written.
    """

    def __init__(self, target: Path, record: Mapping[str, Any]) -> None:
        self.path = partial_path(target)
        self.earlier = self.path / _EARLIER  # an output that is being replaced
        self._made: tuple[int, ...] | None = None  # which directory the output is
        self._lock = self._acquire(target, record)

    @property
    def output(self) -> Path:
        """The directory to be filled, which will be renamed."""
        return self.path / _OUTPUT

    @property
    def was_renamed(self) -> bool:
        """Whether the output is in its place, and a process was killed before it could tidy up."""
        return not os.path.lexists(self.output)

    def begin(self, record: Mapping[str, Any]) -> bool:
        """Keep what an earlier run of the same conversion left, if anything; remove what another conversion left."""
        if not self.was_renamed:
            self._made = identity(self.output)
            self.refuse_others()
            if _read_record(self.path) == dict(record):
                return bool(_listed(self.path))
            if _listed(self.path):
                what = "another conversion (other inputs, options or version) that was interrupted"
                _log.warning("%s holds %s; it is removed, and this one begins from the start", self.path, what)
        self._remove_output()
        _write_new(self.path / _FILES, "")
        _write_new(self.path / _RECORD, json.dumps(record, indent=2))
        self.output.mkdir()
        self._made = identity(self.output)
        return False

    def create(self, *names: str) -> list[Path]:
        """List files that are about to be created in the output, make their directories, and return their paths."""
        self.refuse_others()
        known = set(_listed(self.path))
        for name in names:
            if name not in known and os.path.lexists(self.output / name):
                raise _foreign(self.output / name)
        with os.fdopen(_open(self.path / _FILES, os.O_APPEND), "a", encoding="utf-8") as listed:
            # The line break goes first: a kill may have cut the last line off.
            listed.writelines("\n" + json.dumps(name) for name in names if name not in known)
        paths = [self.output / name for name in names]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(path):
                os.close(_open(path, os.O_CREAT | os.O_EXCL))
        return paths

    def refuse_others(self) -> None:
        """Refuse to go on if there is anything in the output that was not created by :meth:`create`."""
        if identity(self.output) != self._made:
            raise _foreign(self.output)
        found = entries(self.output)
        for name in (*strangers(found, _listed(self.path)), *(name for name in found if not _is_own(found[name]))):
            raise _foreign(self.output / name)

    def write(self, name: str, data: bytes) -> None:
        """Create a small file in the output."""
        (path,) = self.create(name)
        with emptied(path) as file:
            file.write(data)

    def remove(self) -> None:
        """Remove the whole directory, or warn if that fails."""
        if not _is_of(self._lock, self.path):  # removed already, and it may be another process's by now
            return
        try:
            self._remove_output()
            remove_files(self.path, (), *_SMALL)  # nothing but these may be there
            # Under another name first: a half of it would be in the way of the next run.
            going = Path(tempfile.mkdtemp(prefix=f".{PROGRAM}-", dir=self.path.parent))
            self.path.rename(going)
            _discard(going)
        except (OSError, OutputError) as error:
            _log.warning("%s is no longer needed, but cannot be removed (%s); delete it", self.path, error)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)

    def _remove_output(self) -> None:
        if not self.was_renamed:
            self.refuse_others()
            remove_files(self.output, _listed(self.path))
            self.output.rmdir()

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
            _write_new(made / _RECORD, json.dumps(record, indent=2))
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
    for name in _SMALL:
        (directory / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (directory / _OUTPUT).rmdir()
    directory.rmdir()


def partial_path(target: Path) -> Path:
    """The place of a target's unfinished output."""
    return target.with_name(f".{target.name}.partial")


def _read_record(path: Path) -> dict[str, Any] | None:
    """The record in a directory of ours; ``None`` in any other."""
    try:
        with os.fdopen(open_file(path / _RECORD, os.O_NOFOLLOW), "rb") as file:
            record = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("program") == PROGRAM else None


def _write_new(path: Path, text: str) -> None:
    """Write a file under another name, which must be new, and put it in the place of whatever is there."""
    begun = path.with_name(f"{path.name}.new")
    begun.unlink(missing_ok=True)
    with os.fdopen(_open(begun, os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    begun.rename(path)


def emptied(path: Path) -> BinaryIO:
    """A file that :meth:`Partial.create` created, to be written from its beginning."""
    return os.fdopen(_open(path, os.O_TRUNC), "wb")


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)


def _listed(path: Path) -> list[str]:
    """The names in the list of a directory of ours; a ValueError if one leads out of its output."""
    names = []
    with os.fdopen(open_file(path / _FILES, os.O_NOFOLLOW), encoding="utf-8") as file:
        for line in file.read().splitlines():
            with suppress(ValueError, RecursionError):  # cut off by a kill, before the file was created
                names.append(json.loads(line))
    if not all(map(leads_inside, names)):
        raise ValueError("a name leads elsewhere")
    return names


def _is_own(found: os.stat_result) -> bool:
    """Whether something is this user's, a directory or a regular file, and has no second name elsewhere."""
    is_kind = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
    return is_kind and found.st_uid == os.geteuid()


def _is_as_made(path: Path) -> bool:
    """Whether a directory holds what :class:`Partial` makes, as it makes it, and nothing else."""
    found = {entry.name: entry.lstat() for entry in path.iterdir()}
    earlier = found.pop(_EARLIER, None)  # it may be another user's
    try:
        return (
            _read_record(path) is not None
            and found.keys() >= {_RECORD, _FILES, _LOCK}
            and found.keys() <= {*_SMALL, _OUTPUT}
            and all(
                _is_own(state) and stat.S_ISDIR(state.st_mode) == (name == _OUTPUT) for name, state in found.items()
            )
            and (earlier is None or stat.S_ISDIR(earlier.st_mode))
            and _listed(path) is not None
        )
    except (OSError, ValueError):
        return False


def _refuse_foreign(path: Path) -> None:
    """Refuse a place that is taken: by a link, a file, another user's directory, or one that we did not make."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or not _is_as_made(path):
        path.lstat()  # an error if it was removed just now
        advice = "move it elsewhere, or choose another directory"
        raise OutputError(f"{path} was not made by this version of slime-convert; {advice}")


def _is_of(descriptor: int, directory: Path) -> bool:
    """Whether an open lock is the one that a directory has now."""
    try:
        return (directory / _LOCK).stat(follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def entries(directory: Path) -> dict[str, os.stat_result]:
    """Everything in a directory, by its name from there. Links are listed and not followed."""

    def fail(error: OSError) -> None:
        raise error

    walk = os.walk(directory, onerror=fail)
    paths = [Path(root, name) for root, directories, names in walk for name in (*directories, *names)]
    return {str(path.relative_to(directory)): path.lstat() for path in sorted(paths)}


def strangers(found: Mapping[str, os.stat_result], names: Iterable[str]) -> list[str]:
    """Entries that are neither regular files of some names nor directories that these need."""
    files = set(names)
    parents = {str(parent) for name in files for parent in Path(name).parents}
    known = {stat.S_IFREG: files, stat.S_IFDIR: parents}
    strange = [name for name, state in found.items() if name not in known.get(stat.S_IFMT(state.st_mode), ())]
    return sorted(strange, key=lambda name: stat.S_ISDIR(found[name].st_mode))  # what lies in a directory says more


def leads_inside(name: object) -> bool:
    """Whether a value is the name of a file in a directory, as :func:`entries` would give it."""
    if not isinstance(name, str) or name != str(Path(name)) or name == ".":
        return False
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def identity(path: Path) -> tuple[int, ...] | None:
    """Tells whether something is still the same directory, file or link; ``None`` if there is nothing."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return stat.S_IFMT(found.st_mode), found.st_dev, found.st_ino


def remove_files(directory: Path, names: Iterable[str], *kept: str) -> None:
    """Remove files of a directory, and empty directories in it; an OSError if then more than ``kept`` is left."""
    # Only what is found there: a name could lead elsewhere, by itself or through a link.
    listed, found = set(names), entries(directory)
    for name in listed & found.keys():
        if stat.S_ISREG(found[name].st_mode):
            (directory / name).unlink(missing_ok=True)
    parents = {str(parent) for name in listed for parent in Path(name).parents} & found.keys()
    remove_empty(directory / name for name in sorted(parents, reverse=True))
    if others := {path.name for path in directory.iterdir()} - set(kept):
        raise OSError(errno.ENOTEMPTY, f"not empty, it holds {min(others)}")


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove those of some directories that are empty, in their order."""
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


def refuse_unfinished(path: str | Path) -> None:
    """Raise an :class:`UnfinishedError` if a path is, or lies in, the output of a running or interrupted conversion.

    A :class:`CheckpointError` for what cannot be a path: a loop of links, a name with a zero byte.
    """
    try:
        place = Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); give a checkpoint's path") from error
    for directory in (place, *place.parents[:3]):
        name = directory.name
        if name.startswith(".") and name.endswith(".partial") and (directory / _LOCK).is_file():
            target = directory.with_name(name.removeprefix(".").removesuffix(".partial"))
            raise UnfinishedError(
                f"{path} is unfinished: a conversion into {target} is running or was interrupted; "
                "run it again to finish it, and use what it writes then"
            )
