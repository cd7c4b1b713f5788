"""The manifest in ``--save``, which says what a run can be continued from, and the lock of a directory in use.

The manifest is written last, when the checkpoint of every trainer rank lies on disk, and it is replaced in one move.
So whatever is found in ``--save`` besides it is either what it names, or older, or half-written and ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from slime_core.files import open_to_append, read_json, write_whole
from slime_core.types.checks import json_default
from slime_launch.errors import ManifestError

FORMAT_VERSION = 2
FILE_NAME = "manifest.json"
LOCK = "run.lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without locks, such as some of clusters; a run there goes without."""
LOCK_SECONDS = 20.0  # longer than what is left of a killed run takes to end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The state that a run continues from.

    Attributes:
        iteration: Rollouts trained on: the number of the checkpoint and of the next rollout.
        weight_version: Number of the weights in the checkpoint: the rollouts trained on when they were sent.
        checkpoint: The checkpoint's directory below ``--save``; ``None`` before the first one.
        source_state: State of the data source after the last rollout trained on.
        flags: Every flag's value without secrets, to see that the same run is continued.
        output_dir: Where the run writes its metrics and logs.
        load: Checkpoint directory that the run began with.
        ref_load: Checkpoint directory of its reference model.
    """

    iteration: int
    weight_version: int
    checkpoint: str | None
    source_state: dict[str, Any]
    flags: dict[str, Any]
    output_dir: str
    load: str
    ref_load: str


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into a run's ``--save``; a reader finds either the old one or this one."""
    values = {"format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    write_whole(directory / FILE_NAME, json.dumps(values, indent=1, default=json_default))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in ``directory``, or ``None`` if there is none.

    Raises:
        ManifestError: It has another format, is invalid, or its checkpoint is missing.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        values = read_json(path)
        version = values.pop("format_version")
        if version != FORMAT_VERSION:
            raise ManifestError(
                f"{path} has format_version {version}; this slime reads {FORMAT_VERSION}: finish that run with the "
                "slime that began it, or give another --save"
            )
        manifest = Manifest(**values)
        _check_types(manifest)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestError(f"{path} is not a valid manifest ({error}); remove it, or give another --save") from error
    if manifest.checkpoint is not None and not (directory / manifest.checkpoint).is_dir():
        raise ManifestError(
            f"{path} names the checkpoint {manifest.checkpoint}, which is not there; put it back, or give another "
            "--save"
        )
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise a TypeError or a ValueError for what no run writes."""
    kinds = {"int": int, "str": str, "str | None": str | None, "dict[str, Any]": dict}
    for field in dataclasses.fields(manifest):
        value = getattr(manifest, field.name)
        if not isinstance(value, kinds[str(field.type)]):
            raise TypeError(f"{field.name} is {str(value)[:80]!r}")
    if manifest.checkpoint is not None and {"..", "/"} & {*Path(manifest.checkpoint).parts}:
        raise ValueError(f"the checkpoint {manifest.checkpoint[:80]!r} is not a directory below it")


@contextlib.contextmanager
def locked(
    directory: Path, *, check: Callable[[], None], seconds: float | None = None, flag: str = "--save"
) -> Iterator[None]:
    """Have a run's directory alone until the block ends, or the process, however it ends.

    Args:
        directory: Is made if it is not there, and removed at the end if nothing but the lock was put into it.
        check: Called while waiting for another run to end; may raise.
        seconds: Longest wait; ``None`` means 20.
        flag: The flag that gives the directory.

    Raises:
        ManifestError: Another run uses the directory.
    """
    is_new, deadline = not directory.exists(), time.monotonic() + (LOCK_SECONDS if seconds is None else seconds)
    while (file := _try_to_lock(directory / LOCK)) is None:
        if time.monotonic() > deadline:
            user = (directory / LOCK).read_text(encoding="utf-8").strip() if (directory / LOCK).exists() else "ending"
            raise ManifestError(
                f"{flag} {directory} is in use by another run ({user}); stop it, or give another {flag}"
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
        file = stack.enter_context(open_to_append(path))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            stack.pop_all()  # stays open
            return file
    return None
