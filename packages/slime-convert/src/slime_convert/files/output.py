"""Output directories that appear whole or not at all; an interrupted conversion can be continued."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_convert.errors import CheckpointError, OutputError
from slime_convert.files import read_json
from slime_convert.files.partial import (
    PROGRAM,
    Conversion,
    Partial,
    entries,
    identity,
    leads_inside,
    partial_path,
    remove_empty,
    remove_files,
    strangers,
    version,
)

MANIFEST = ".slime-convert.json"
"""A file in each output: what wrote it, and the names and sizes of its files, the only ones that ``force`` replaces."""

_log = logging.getLogger(__name__)


@contextmanager
def new_directory(target: str | Path, conversion: Conversion, *, force: bool) -> Iterator[Partial]:
    """A directory to fill, which becomes ``target`` when the block ends without an error.

    What an earlier run of the same conversion wrote is kept. After an interrupt or a full disk the directory stays for
    the next run; after any other error, such as a damaged input, everything is as it was before, and what an earlier
    run left stays too.

    Args:
        target: The directory to create; it may exist if it is empty. A link is followed.
        conversion: What is converted. ``target`` may not be, hold or lie in one of its inputs.
        force: Replace an earlier output at ``target``.

    Yields:
        The unfinished output, next to ``target``, so that the final renaming stays within one file system.

    Raises:
        OutputError: ``target`` exists, is written by another process, or cannot be written.
    """
    made: list[Path] = []
    kept = False
    try:
        path = Path(target).resolve()
        _check_place(path, conversion.inputs)
        if not os.path.lexists(partial_path(path)):
            _check_existing(path, force)
        record = conversion.record()
        _make_parents(path, made)
        partial = Partial(path, record)
    except BaseException as error:
        remove_empty(made)
        if isinstance(error, OSError | RuntimeError | ValueError):  # a link to itself; a name with a zero byte
            raise OutputError(_unwritable(Path(target), error)) from error
        raise
    try:
        # First finish what a process that was killed during the final renaming left.
        if partial.earlier.exists() and not partial.was_renamed:
            partial.earlier.rename(path)
        _remove_earlier(partial.earlier)
        before = identity(path)
        _check_existing(path, force)
        kept = partial.begin(record)
        yield partial
        if changed := conversion.changed_input():
            raise CheckpointError(f"{changed} was changed while it was read; run the command again when it stays")
        _put_in_place(partial, path, conversion.command, before, force=force)
    except OSError as error:
        more = f"; or make room, and {_again(partial)}" * _is_kept(partial)
        raise OutputError(_unwritable(path, error) + more) from error
    except KeyboardInterrupt as error:
        if _is_kept(partial) and not partial.was_renamed:
            error.add_note(_again(partial))
        raise
    except BaseException as error:
        # The weights that are finished are right, unless an input was changed under them.
        if not isinstance(error, OutputError) and not (kept and conversion.changed_input() is None):
            partial.remove()
        raise
    finally:
        if not _is_kept(partial):
            partial.remove()
        partial.close()
        remove_empty(made)


def _is_kept(partial: Partial) -> bool:
    """Whether there is something that the next run can use."""
    with suppress(OSError):
        return partial.earlier.exists() or any(partial.output.iterdir())
    return False


def _again(partial: Partial) -> str:
    return f"run the same command again to continue, or delete {partial.path}"


def _unwritable(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"cannot write {path} ({error.strerror}, with the 9 characters of .….partial); choose a shorter name"
    return f"cannot write {path} ({error}); choose a directory that you may write to and that has room"


def _check_place(path: Path, inputs: tuple[Path, ...]) -> None:
    for source in inputs:
        place = source.resolve()
        if path in (place, *place.parents):
            raise OutputError(f"output {path} is or holds the input {source}; choose another directory")
        if place in path.parents:
            raise OutputError(f"output {path} lies in the input {source}; choose a directory outside of it")
    # The finished directory is renamed to its place, which these two do not survive.
    if path.is_mount() or path == Path.cwd():
        kind = "a mount point" if path.is_mount() else "the working directory"
        raise OutputError(f"output {path} is {kind}; choose a directory inside it")
    if path.exists() and not path.is_dir():
        raise OutputError(f"output {path} is a file; choose a directory that does not exist yet")


def _check_existing(path: Path, force: bool) -> None:
    if _is_free(path):
        return
    if not force:
        raise OutputError(f"output {path} exists already; choose another directory, or replace it with force=True")
    _own_files(path)


def _is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _own_files(path: Path) -> list[str]:
    """Names of an earlier output's files except the manifest; an error if there is anything else in it."""
    found, listed = entries(path), _manifest(path)
    strange = strangers(found, {*listed, MANIFEST})
    strange += [name for name in sorted(listed.keys() & found.keys()) if listed[name] != found[name].st_size]
    if strange or (found and not listed):
        what = strange[0] if strange else "none of its files"
        more = f" and {len(strange) - 1} more" * (len(strange) > 1)
        raise OutputError(
            f"output {path} is not as slime-convert wrote it (it holds {what}{more}), so force=True does not replace "
            "it; move or delete it yourself, or choose another directory"
        )
    return list(listed)


def _manifest(path: Path) -> dict[str, int]:
    """Sizes of an output's files by name, as recorded when it was written; none if it is not such a record."""
    with suppress(OutputError, ValueError, KeyError, TypeError):
        listed = read_json(path, MANIFEST, OutputError, "")
        files = dict(listed["files"]) if PROGRAM in listed else {}
        # It may have come with a download. Were one name to lead elsewhere, nothing that it says would count.
        return files if all(map(leads_inside, files)) and MANIFEST not in files else {}
    return {}


def _make_parents(path: Path, made: list[Path]) -> None:
    """Make the directories above a path, and list those that were made, the innermost first."""
    for parent in reversed([parent for parent in path.parents if not os.path.lexists(parent)]):
        parent.mkdir()
        made.insert(0, parent)


def _put_in_place(partial: Partial, path: Path, command: str, before: tuple[int, ...] | None, *, force: bool) -> None:
    """Rename the output to its place, where only what was there ``before`` is replaced."""
    partial.refuse_others()
    names = sorted(str(file.relative_to(partial.output)) for file in partial.output.rglob("*") if file.is_file())
    sizes = {name: (partial.output / name).stat().st_size for name in names if name != MANIFEST}
    manifest = {PROGRAM: version(), "command": command, "files": sizes}
    partial.write(MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    # So that after a power failure no renamed directory lacks its content.
    with ThreadPoolExecutor(8, thread_name_prefix="flush") as several:  # each waits for the disk, mostly
        list(several.map(_flush, partial.output.rglob("*")))
    _flush(partial.output)
    with suppress(OSError):  # the directory to be replaced does not exist, or its file system has no permissions
        partial.output.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)
    partial.refuse_others()
    if identity(path) not in (before, None):
        raise _replaced(partial, path)
    replace = force and not _is_free(path)
    if replace:
        _own_files(path)
    try:
        if replace:
            path.rename(partial.earlier)
            if identity(partial.earlier) != before:
                raise _replaced(partial, path)
        # This replaces an empty directory too, and fails if something has appeared there since the check.
        partial.output.rename(path)
    except BaseException:
        # The earlier output comes back after an interrupt too.
        if os.path.lexists(partial.earlier) and not os.path.lexists(path):
            partial.earlier.rename(path)
        raise
    try:
        _flush(path.parent)
        _remove_earlier(partial.earlier)
        partial.remove()
    except KeyboardInterrupt as error:
        error.add_note(f"{path} is complete" + f"; delete {partial.path}" * partial.earlier.exists())
        raise


def _replaced(partial: Partial, path: Path) -> OutputError:
    return OutputError(f"output {path} was replaced during the conversion; move it elsewhere, and {_again(partial)}")


def _remove_earlier(earlier: Path) -> None:
    """Remove an output that was replaced, if there is one and nothing else was put into it since."""
    if not os.path.lexists(earlier):
        return
    try:
        remove_files(earlier, _own_files(earlier), MANIFEST)
        (earlier / MANIFEST).unlink(missing_ok=True)  # last, for the next run needs it
        earlier.rmdir()
    except (OSError, OutputError) as error:
        _log.warning("%s was replaced, but cannot be removed (%s); delete it", earlier, error)


def _flush(path: Path) -> None:
    """Put a file, or the list of a directory's files, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems, of networks mostly, flush files only.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
