"""Files of a checkpoint: only regular ones, and only inside its own directory.

A checkpoint may come from anywhere. A link or an index in it could lead to somebody else's file, to a pipe that never
ends, or to a device.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from slime_convert.errors import ConvertError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_ADVICE = "use a complete copy of the checkpoint"
_MAX_BYTES = 100_000_000  # of a file that is read as a whole: larger than any index, and what memory has room for


def file_inside(directory: Path, name: str | Path, error: type[ConvertError], advice: str = _ADVICE) -> Path:
    """The real path of a file in the directory of a checkpoint, links resolved.

    Raises:
        ConvertError: As ``error``: the file is missing, not a regular one, or outside the directory; ``advice`` says
            what to do then.
    """
    path = directory / name
    try:
        root, found = directory.resolve(), path.resolve()
        # A hub cache keeps snapshots/REVISION as links into blobs.
        blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
        is_inside = any(found.is_relative_to(allowed) for allowed in (root, *blobs))
        kind = found.stat().st_mode if is_inside else 0  # whether a file outside exists is not revealed
    except (OSError, RuntimeError, ValueError) as cause:  # a loop of links; a name with a zero byte
        raise error(f"cannot read {path} ({getattr(cause, 'strerror', None) or cause}); {advice}") from cause
    if not is_inside:
        raise error(f"{path} leads to {found}, outside the checkpoint's directory {root}; copy the file into it")
    if not stat.S_ISREG(kind):
        raise error(f"{path} is {_KINDS.get(stat.S_IFMT(kind), 'something else')}, not a regular file; {advice}")
    return found


def refuse_missing(directory: Path, names: Collection[str], index: str, error: type[ConvertError]) -> None:
    """Raise an error if some of the files that an index names do not exist."""
    own = (name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts)
    if gone := sorted(name for name in own if not os.path.lexists(directory / name)):
        raise error(
            f"{len(gone)} of the {len(names)} files that {directory / index} names are missing, such as {gone[0]}; "
            f"{_ADVICE}"
        )


def open_file(path: Path, flags: int = 0) -> int:
    """A descriptor of a regular file, to be read; an :class:`OSError` if it is no longer a regular one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor


def read_file(
    directory: Path, name: str | Path, error: type[ConvertError], advice: str = _ADVICE, *, most: int = _MAX_BYTES
) -> bytes:
    """The bytes of a file of a checkpoint; errors as of :func:`file_inside`, and for more than ``most`` bytes."""
    path = file_inside(directory, name, error, advice)
    try:
        with os.fdopen(open_file(path), "rb") as file:
            # No more than its size: another program may be writing to it.
            if (size := os.fstat(file.fileno()).st_size) > most:  # a sparse file may have any size
                raise error(f"{path} has {size} bytes; allowed: {most}; {advice}")
            return file.read(size)
    except (OSError, MemoryError) as cause:
        why = getattr(cause, "strerror", None) or str(cause) or "not enough memory"
        raise error(f"cannot read {path} ({why}); {advice}") from cause


def read_json(directory: Path, name: str | Path, error: type[ConvertError], advice: str) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; errors as of :func:`file_inside`, and for any other content."""
    path = directory / name
    try:
        value = json.loads(read_file(directory, name, error, advice))
    except (ValueError, RecursionError, MemoryError) as cause:
        raise error(f"{path} is not valid JSON ({cause}); {advice}") from cause
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}, not an object; {advice}")
    return value
