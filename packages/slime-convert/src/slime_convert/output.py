"""Output directories that appear whole or not at all, and that a conversion which was interrupted can continue."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from slime_convert.errors import CheckpointError, ConvertError, OutputError
from slime_convert.unfinished import Conversion, Unfinished

_log = logging.getLogger(__name__)


@contextmanager
def new_directory(target: str | Path, conversion: Conversion, *, force: bool, marker: str) -> Iterator[Unfinished]:
    """A directory to fill, which becomes ``target`` when the block ends without an error.

    What the same conversion left there before is kept. After an interrupt or a full disk it stays for the next run;
    after an error of ours, such as a damaged input, it is removed.

    Args:
        target: The directory to create. An empty one may exist already; of a link, what it points to is meant.
        conversion: What is converted. ``target`` may neither be nor hold one of its inputs.
        force: Replace an earlier output at ``target``.
        marker: A file that an earlier output holds. ``force`` replaces no other directory.

    Yields:
        The unfinished output, beside ``target``, so that the final renaming stays within one file system.

    Raises:
        OutputError: ``target`` exists, is or holds an input, is written by another process, or cannot be written.
        CheckpointError: A file of the inputs cannot be read.
    """
    try:
        path = Path(target).resolve()
        _check_place(path, conversion.inputs)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Unfinished(path)
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself; a name with a zero byte
        raise OutputError(_unwritable(Path(target), error)) from error
    try:
        _mend(unfinished, path)
        _check_existing(path, force, marker)
        _begin(unfinished, conversion)
        yield unfinished
        _put_in_place(unfinished, path, force and (path / marker).is_file())
    except ConvertError as error:
        if not isinstance(error, OutputError):  # an input is wrong
            unfinished.remove()
        raise
    except (OSError, SafetensorError) as error:
        if (unread := _unread_input(error, conversion)) is not None:
            raise unread from error
        again = _again(unfinished)
        raise OutputError(_unwritable(path, error) + (f"; or make room, and {again}" if again else "")) from error
    except KeyboardInterrupt as error:
        if again := _again(unfinished):
            error.add_note(again)
        raise
    finally:
        unfinished.close()


def _unwritable(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"cannot write {path} ({error.strerror}, with the 9 characters of .….partial); choose a shorter name"
    return f"cannot write {path} ({error}); choose a directory that you may write to and that has room"


def _unread_input(error: Exception, conversion: Conversion) -> CheckpointError | None:
    """What to say of an error in reading an input, if it is one. An error in copying names two files."""
    if not isinstance(error, OSError) or error.filename is None or error.filename2 is not None:
        return None
    place = Path(os.fsdecode(error.filename))
    if not any(place.is_relative_to(root) for source in conversion.inputs for root in (source, source.resolve())):
        return None
    return CheckpointError(f"cannot read {place} ({error.strerror}); make it readable and run the command again")


def _again(unfinished: Unfinished) -> str:
    """What to do about that which stays, if anything does."""
    with suppress(OSError):
        if unfinished.exists:
            return f"run the same command again to continue, or delete {unfinished.path}"
    return ""


def _check_place(path: Path, inputs: tuple[Path, ...]) -> None:
    for source in inputs:
        if path in (source.resolve(), *source.resolve().parents):
            raise OutputError(f"output {path} is or holds the input {source}; choose another directory")
    # The finished directory is renamed to its place, which these two do not survive.
    if path.is_mount() or path == Path.cwd():
        kind = "a mount point" if path.is_mount() else "the working directory"
        raise OutputError(f"output {path} is {kind}; choose a directory inside it")
    if path.exists() and not path.is_dir():
        raise OutputError(f"output {path} is a file; choose a directory that does not exist yet")


def _check_existing(path: Path, force: bool, marker: str) -> None:
    if _is_free(path):
        return
    if not force:
        raise OutputError(f"output {path} exists already; choose another directory, or replace it with --force")
    if not (path / marker).is_file():
        raise OutputError(
            f"output {path} is no earlier output (it has no {marker}), so --force does not replace it; "
            "choose another directory"
        )


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _begin(unfinished: Unfinished, conversion: Conversion) -> None:
    record = conversion.record()
    if unfinished.is_of(record):
        return
    if unfinished.exists:
        _log.warning(
            "%s holds another conversion (other inputs, options or versions), which was interrupted; "
            "it is thrown away, and this one begins anew",
            unfinished.path,
        )
    unfinished.begin(record)


def _mend(unfinished: Unfinished, path: Path) -> None:
    """Finish what a process that was killed during the final renaming left."""
    old = unfinished.aside
    if old.exists():
        if unfinished.exists and _is_free(path):
            old.rename(path)
        elif unfinished.was_renamed and not _is_free(path):
            unfinished.discard()
        else:
            raise OutputError(f"{old} is in the way: it may hold an earlier output; move it to {path}, or elsewhere")
    if unfinished.was_renamed:
        unfinished.clear()


def _put_in_place(unfinished: Unfinished, path: Path, replace: bool) -> None:
    _flush(unfinished.output)
    _take_mode(unfinished.output, path)
    try:
        if replace:
            path.rename(unfinished.aside)
        # Over an empty directory too; it fails if something has appeared there since the check.
        unfinished.output.rename(path)
    except BaseException:
        # The earlier output comes back after an interrupt too.
        if replace and unfinished.aside.exists() and not path.exists():
            unfinished.aside.rename(path)
        raise
    try:
        _flush_directory(path.parent)
        if replace:
            unfinished.discard()
        unfinished.remove()
    except KeyboardInterrupt as error:
        error.add_note(f"{path} is complete")
        raise


def _take_mode(directory: Path, earlier: Path) -> None:
    """A directory that was made for some users only stays theirs."""
    with suppress(OSError):  # there is none, or its file system has no modes
        mode = stat.S_IMODE(earlier.stat().st_mode) | stat.S_IRWXU
        if mode != stat.S_IMODE(directory.stat().st_mode):
            directory.chmod(mode)


def _flush(root: Path) -> None:
    """Put everything on the disk, so that after a power failure no renamed directory lacks what was in it."""
    for directory, _, names in os.walk(root):
        for name in names:
            _flush_file(Path(directory, name))
        _flush_directory(Path(directory))


def _flush_directory(path: Path) -> None:
    try:
        _flush_file(path)
    except OSError as error:
        # Some file systems, of networks mostly, flush files only.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise


def _flush_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
