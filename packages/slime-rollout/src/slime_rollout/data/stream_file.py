"""One prompt file read row by row from any place on, with an identity that takes no reading of all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from slime_core.errors import DataError
from slime_rollout.data.jsonl import json_lines
from slime_rollout.data.read import check_kind, check_rows_left, file_errors, is_table, split_slice
from slime_rollout.data.rows import RawRow
from slime_rollout.data.tables import read_parquet, read_saved

_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file, spread evenly from its first byte to its last


@dataclass(frozen=True)
class Mark:
    """A place between two rows of a file; the default is its beginning.

    Attributes:
        row: Rows before it, blank lines not counted.
        line: Lines before it; 0 in a table.
        offset: Bytes before it, of what is unpacked; 0 in a table.
    """

    row: int = 0
    line: int = 0
    offset: int = 0


class StreamFile:
    """A prompt file, or a slice of one.

    JSON Lines are read from a byte offset on. In packed ones, what is before it is unpacked again to get there: at some
    hundred MB a second, when a run continues. Parquet files go to the row group, and read less than it at once;
    directories of ``datasets`` are mapped into memory.

    Args:
        path: The file, perhaps with ``@[a:b]`` behind it.

    Raises:
        DataError: It is missing, or no file of its format; or the slice counts from the end of JSON Lines, whose length
            nobody knows before all of it is read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        name, self._slice = split_slice(path)
        self._file = Path(name)
        self._begin = Mark()
        with file_errors(self._file):
            check_kind(self._file)
            self._is_table = is_table(self._file)
            self._total = 0
            if self._is_table:
                self._total, _ = self._table(slice(0, 0))
                check_rows_left(path, self._total)
            self.size = _size(self._file)
            self.digest = _digest(self._file)
        if not self._is_table:
            self._check_slice()

    def rows(self, mark: Mark) -> Iterator[tuple[Mark, RawRow]]:
        """The rows from a place on, each with the place behind it.

        Raises:
            DataError: The file is damaged or cannot be read, its size has changed, or it has no row from its beginning
                on.
        """
        with file_errors(self._file):
            if (size := _size(self._file)) != self.size:
                raise DataError(
                    f"{self._file} changed while it was read ({self.size} → {size} bytes); leave a file that is "
                    "streamed as it is, and start a new run with this one"
                )
            yield from self._table_rows(mark) if self._is_table else self._line_rows(mark)

    def _line_rows(self, mark: Mark) -> Iterator[tuple[Mark, RawRow]]:
        first, last = self._slice.start or 0, self._slice.stop
        begins = mark == Mark()
        mark = self._begin if begins else mark
        row = mark.row
        if row == last:
            return
        for number, offset, line in json_lines(self._file, number=mark.line, offset=mark.offset):
            row += 1
            behind = Mark(row, number, offset)
            if row > first:
                yield behind, RawRow(where=f"{self._file}:{number}", value=line)
            elif row == first:
                self._begin = behind  # the next epoch need not look for it
            if row == last:  # what is behind the slice is not looked at
                return
        if begins and row <= first:
            check_rows_left(self.path, row)

    def _table_rows(self, mark: Mark) -> Iterator[tuple[Mark, RawRow]]:
        start, stop, _ = self._slice.indices(self._total)
        start = max(start, mark.row)
        if start < stop:
            for row, raw in enumerate(self._table(slice(start, stop))[1], start + 1):
                yield Mark(row), raw

    def _table(self, rows: slice) -> tuple[int, Iterator[RawRow]]:
        return read_saved(self._file, rows) if self._file.is_dir() else read_parquet(self._file, rows)

    def _check_slice(self) -> None:
        start, stop = self._slice.start or 0, self._slice.stop
        if start < 0 or (stop is not None and stop < 0):
            raise DataError(
                f"{self.path} counts from the end of JSON Lines, which --streaming-data would have to read whole for "
                "that; count from the beginning, use Parquet, or leave out --streaming-data"
            )
        if stop is not None and stop <= start:
            raise DataError(f"{self.path} leaves no row; give a slice that holds some of them")


def _size(file: Path) -> int:
    return sum(part.stat().st_size for part in _parts(file))


def _digest(file: Path) -> str:
    """A hash of sizes and of samples of the bytes: two files that differ in one row in the middle may share it."""
    hasher = hashlib.blake2b(digest_size=16)
    parts = _parts(file)
    hasher.update(repr([part.stat().st_size for part in parts]).encode())
    # Of a directory: what `datasets` says of it, its fingerprint included, and the first and last data.
    for part in dict.fromkeys([parts[0], parts[min(1, len(parts) - 1)], parts[-1]]):
        with part.open("rb") as stream:
            room = max(part.stat().st_size - _SAMPLE_BYTES, 0)
            for offset in dict.fromkeys(room * number // (_SAMPLES - 1) for number in range(_SAMPLES)):
                stream.seek(offset)
                hasher.update(stream.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


def _parts(file: Path) -> list[Path]:
    """The files that a prompt file consists of."""
    if not file.is_dir():
        return [file]
    state = file / "state.json"
    names = [entry["filename"] for entry in orjson.loads(state.read_bytes())["_data_files"]]
    return [state, *(file / name for name in names)]
