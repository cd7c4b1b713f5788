"""JSON Lines, one object per line, plain or packed with gzip, bzip2, xz or Zstandard."""

from __future__ import annotations

import contextlib
import gzip
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_rollout.data.extras import needed
from slime_rollout.data.rows import RawRow

_LONGEST = 256 << 20  # bytes of a line; what is no JSON Lines at all must not fill the memory
_BOM = b"\xef\xbb\xbf"
# How files begin that are none of JSON Lines in UTF-8, and what they are called then.
_OTHERS = {
    b"\x1f\x8b": "packed with gzip; let its name end in .gz",
    b"BZh": "packed with bzip2; let its name end in .bz2",
    b"\xfd7zXZ": "packed with xz; let its name end in .xz",
    b"\x28\xb5\x2f\xfd": "packed with Zstandard; let its name end in .zst",
    b"PK\x03\x04": "packed with zip; pack it with gzip instead",
    b"PAR1": "a Parquet file; let its name end in .parquet",
    b"\xff\xfe": "UTF-16; write it in UTF-8",
    b"\xfe\xff": "UTF-16; write it in UTF-8",
}


def read_jsonl(file: Path, rows: slice) -> tuple[int, list[RawRow]]:
    """The lines of a file that are not blank, not parsed yet.

    Args:
        file: Its path; what ends in ``.gz``, ``.bz2``, ``.xz`` or ``.zst`` is unpacked.
        rows: Which of them; without a step. What is behind them is not read, if they count from the beginning.

    Returns:
        How many there are, as far as was read, and the chosen ones.

    Raises:
        DataError: What is packed is damaged, or needs an extra that is not installed; or it is no JSON Lines.
        OSError: The file cannot be read.
    """
    first, last = rows.start or 0, rows.stop
    from_end = first < 0 or (last is not None and last < 0)
    total, kept = 0, []
    with contextlib.closing(json_lines(file)) as lines:
        for number, _, line in lines:
            total += 1
            if from_end or (total > first and (last is None or total <= last)):
                kept.append((number, line))
            if kept and total == last and not from_end:
                break
    return total, [RawRow(where=f"{file}:{number}", value=line) for number, line in (kept[rows] if from_end else kept)]


def json_lines(file: Path, *, number: int = 0, offset: int = 0) -> Generator[tuple[int, int, bytes], None, None]:
    """Lines of a file that are not blank, one at a time.

    Args:
        file: Its path, as for :func:`read_jsonl`.
        number: Lines before ``offset``.
        offset: Where to begin, in bytes of what is unpacked; in a packed file all before is unpacked to get there.

    Yields:
        A line's number from 1, the offset behind it, and the line without white space around it.

    Raises:
        DataError: As for :func:`read_jsonl`; or a line is too long to be one.
        OSError: The file cannot be read.
    """
    with _open(file) as stream:
        if offset:
            stream.seek(offset)
        while line := stream.readline(_LONGEST + 1):
            if number == 0:
                _check_text(file, line)
            number, offset = number + 1, offset + len(line)
            if len(line) > _LONGEST:
                raise DataError(f"{file}:{number}: over {_LONGEST >> 20} MiB long; is this JSON, one object per line?")
            if stripped := (line.removeprefix(_BOM) if number == 1 else line).strip():
                yield number, offset, stripped


def _check_text(file: Path, line: bytes) -> None:
    for begin, what in _OTHERS.items():
        if line.startswith(begin):
            raise DataError(f"{file} is no JSON Lines: it is {what}")


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    opener, damage = _opener(file)
    with opener(file, "rb") as stream:
        try:
            yield stream
        except damage as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's, not the format's
            raise DataError(f"{file} is damaged or cut off and cannot be unpacked ({error}); write it again") from None


def _opener(file: Path) -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
    """What opens a file, and what it raises for a damaged one, `OSError` without a number among it."""
    match file.suffix.lower():
        case ".gz":
            return gzip.open, (OSError, EOFError, zlib.error)
        case ".bz2":
            import bz2  # some builds of Python lack it

            return bz2.open, (OSError, EOFError)
        case ".xz":
            import lzma  # as bz2

            return lzma.open, (OSError, EOFError, lzma.LZMAError)
        case ".zst":
            name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
            zstd = needed(name, extra="zstd", file=file)
            return zstd.open, (OSError, EOFError, zstd.ZstdError)
        case _:
            return open, (OSError,)
