"""Output directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from slime_convert.errors import OutputError


@contextmanager
def new_directory(target: str | Path, *, force: bool, keep: frozenset[Path], marker: str) -> Iterator[Path]:
    """A directory to fill, which becomes ``target`` when the block ends without an error and vanishes otherwise.

    Args:
        target: The directory to create. An empty one may exist already; of a link, what it points to is meant.
        force: Replace an earlier output at ``target``.
        keep: Inputs of the conversion; ``target`` may neither be nor hold one of them.
        marker: A file that an earlier output holds. ``force`` replaces no other directory.

    Yields:
        A directory beside ``target``, so that the final renaming stays within one file system. A process that is
        killed leaves it there, under a hidden name; it is in nobody's way.

    Raises:
        OutputError: ``target`` exists, is or holds an input, or cannot be written.
    """
    path = Path(target).resolve()
    _check_target(path, force, keep, marker)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield partial
        _give_usual_modes(partial)
        _put_in_place(partial, path, force and (path / marker).is_file())
    except (OSError, SafetensorError) as error:
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_target(path: Path, force: bool, keep: frozenset[Path], marker: str) -> None:
    for source in keep:
        if path in (source.resolve(), *source.resolve().parents):
            raise OutputError(f"output {path} is or holds the input {source}; choose another directory")
    # The finished directory is renamed to its place, which these two do not survive.
    if path.is_mount() or path == Path.cwd():
        kind = "a mount point" if path.is_mount() else "the working directory"
        raise OutputError(f"output {path} is {kind}; choose a directory inside it")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise OutputError(f"output {path} is a file; choose a directory that does not exist yet")
    if not force:
        raise OutputError(f"output {path} exists already; choose another directory, or replace it with --force")
    if not (path / marker).is_file():
        raise OutputError(
            f"output {path} is no earlier output (it has no {marker}), so --force does not replace it; "
            "choose another directory"
        )


def _put_in_place(partial: Path, path: Path, replace: bool) -> None:
    if not replace:
        # Over an empty directory too; it fails if something has appeared there since the check.
        partial.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    try:
        path.rename(old / path.name)
        partial.rename(path)
    finally:
        # An error or an interrupt between the two gives the earlier output back.
        if not path.exists():
            (old / path.name).rename(path)
        shutil.rmtree(old, ignore_errors=True)


def _unwritable(path: Path, error: Exception) -> OutputError:
    return OutputError(f"cannot write {path} ({error}); choose a directory that you may write to and that has room")


def _give_usual_modes(root: Path) -> None:
    """Readable as any new file is: mkdtemp and safetensors create theirs for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (root, *root.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
