"""Files that appear whole or not at all, even after a power failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds either the old one or this one. One process writes to it at a time."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes the file ``path`` at the end of the block."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    sync(partial)
    partial.replace(path)
    sync(path.parent)  # a rename is data of the directory


def sync(path: Path) -> None:
    """Wait until a file or a directory is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
