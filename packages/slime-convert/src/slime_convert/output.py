"""Output directories that appear whole or not at all, and that a conversion which was interrupted can continue."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from slime_convert.errors import ConvertError, OutputError
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
    """
    path = Path(target).resolve()
    _check_place(path, conversion.inputs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Unfinished(path)
    except OSError as error:
        raise OutputError(_unwritable(path, error)) from error
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
        again = f"; or make room, and {_again(unfinished)}" if unfinished.exists else ""
        raise OutputError(f"{_unwritable(path, error)}{again}") from error
    except KeyboardInterrupt as error:
        if unfinished.exists:
            error.add_note(_again(unfinished))
        raise
    finally:
        unfinished.close()


def _unwritable(path: Path, error: Exception) -> str:
    return f"cannot write {path} ({error}); choose a directory that you may write to and that has room"


def _again(unfinished: Unfinished) -> str:
    return f"run the same command again to continue, or delete {unfinished.path}"


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
    old = _aside(path)
    if not old.exists():
        return
    if _is_free(path):
        old.rename(path)
    elif unfinished.was_renamed:
        shutil.rmtree(old)
    else:
        raise OutputError(f"{old} holds an earlier output, but there is a new {path}; move one of them away")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _put_in_place(unfinished: Unfinished, path: Path, replace: bool) -> None:
    _flush(unfinished.output)
    old = _aside(path)
    if replace:
        path.rename(old)
    try:
        # Over an empty directory too; it fails if something has appeared there since the check.
        unfinished.output.rename(path)
    except BaseException:
        # The earlier output comes back after an interrupt too.
        if replace and not path.exists():
            old.rename(path)
        raise
    _flush_file(path.parent)
    if replace:
        shutil.rmtree(old)
    unfinished.remove()


def _flush(root: Path) -> None:
    """Put everything on the disk, so that after a power failure no renamed directory lacks what was in it."""
    for directory, _, names in os.walk(root):
        for name in names:
            _flush_file(Path(directory, name))
        _flush_file(Path(directory))


def _flush_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
