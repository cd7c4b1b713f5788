"""JSON Lines, one object per line, plain or packed with gzip or Zstandard."""

from __future__ import annotations

import contextlib
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_rollout.data.extras import needed
from slime_rollout.data.rows import RawRow


def read_jsonl(file: Path, rows: slice) -> tuple[int, list[RawRow]]:
    """The lines of a file that are not blank, not parsed yet.

    Args:
        file: Its path; what ends in ``.gz`` or ``.zst`` is unpacked.
        rows: Which of them.

    Returns:
        How many there are in all, and the chosen ones.

    Raises:
        DataError: What is packed is damaged, or needs an extra that is not installed.
        OSError: The file cannot be read.
    """
    numbered = list(_lines(file))
    return len(numbered), [RawRow(where=f"{file}:{number}", value=line) for number, line in numbered[rows]]


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    with _open(file) as stream:
        for number, line in enumerate(stream, 1):
            if stripped := line.strip():
                yield number, stripped


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    opener: Callable[..., Any]
    damage: tuple[type[Exception], ...]
    if file.suffix == ".gz":
        opener, damage = gzip.open, (gzip.BadGzipFile, zlib.error, EOFError)
    elif file.suffix == ".zst":
        zstd = needed("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", extra="zstd", file=file)
        opener, damage = zstd.open, (zstd.ZstdError, EOFError)
    else:
        opener, damage = open, ()
    with opener(file, "rb") as stream:
        try:
            yield stream
        except damage as error:
            raise DataError(f"{file} is damaged or cut off and cannot be unpacked ({error}); write it again") from None
