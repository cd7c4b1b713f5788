"""Small files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds either the old one or this one, even after a power cut.

    Args:
        path: The file; its directory must exist. One process writes to it at a time.
        text: All that it holds.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # a rename is data of the directory
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
