"""Prompt files of every format, or slices of them, read row by row from any place on.

A directory is one that ``datasets.save_to_disk`` wrote, ``.parquet`` is Parquet, and everything else JSON Lines or one
JSON array, decompressed where it ends in ``.gz``, ``.bz2``, ``.xz`` or ``.zst``. Any of them may end in ``@[a:b]``,
which takes the rows from a to b as a Python slice does.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from slime_core.errors import DataError
from slime_core.files import read_bytes
from slime_core.importing import install_hint
from slime_rollout.data.json_array import BOM, array_items, is_array

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>|-?\d+):(?P<stop>|-?\d+)\]")
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of a file, spread evenly from its first byte to its last

_LONGEST = 256 << 20  # bytes of a line: a file that is not JSON Lines at all must not fill the memory
# Most that a compressed file unpacks to, by its size or in any case: rows take much more memory than their text.
_UNPACKED_TIMES, _UNPACKED_BYTES = 200, 4 << 20
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "backports.zstd"}
if sys.version_info >= (3, 14):
    _COMPRESSED[".zst"] = "compression.zstd"
# The first bytes of files that are not JSON Lines in UTF-8, and what they are instead.
_OTHER_FORMATS = {
    b"\x1f\x8b": "gzip; rename it to end in .gz",
    b"BZh": "bzip2; rename it to end in .bz2",
    b"\xfd7zXZ": "xz; rename it to end in .xz",
    b"\x28\xb5\x2f\xfd": "Zstandard; rename it to end in .zst",
    b"PK\x03\x04": "zip; compress it with gzip instead",
    b"PAR1": "Parquet; rename it to end in .parquet",
    b"\xff\xfe": "UTF-16; write it in UTF-8",
    b"\xfe\xff": "UTF-16; write it in UTF-8",
}

# Arrow's name of columns of JSON text: datasets writes objects whose fields differ from row to row.
_JSON = "arrow.json"
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1000, 1 << 20  # at most this becomes Python objects at once, for usual rows
_BUFFER = 1 << 20  # bytes of a column that are read at once; the default is a whole row group
# Raised for single values that Python cannot hold: text that is not UTF-8, maps with a key twice, times out of range.
_BAD_VALUE = (ValueError, KeyError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """A row as its file holds it: a line of JSON, the columns' values, or why they cannot be read from the file."""

    where: str
    value: bytes | dict[str, Any] | DataError


@dataclass(frozen=True)
class Mark:
    """A place between two rows of a file: rows, lines and decompressed bytes before it; in a table only rows."""

    row: int = 0
    line: int = 0
    offset: int = 0


class PromptFile:
    """A prompt file, or a slice of one; ``streamed`` refuses a slice that needs the whole file before its first row.

    JSON is read from a byte offset on; in compressed files, everything before it is decompressed again to get there.
    Parquet files are read from a row group on, in parts; directories of ``datasets`` are mapped into memory.
    Raises `DataError` if it is missing, empty or damaged, or the slice is empty; rows of JSON Lines are not looked at
    yet.
    """

    def __init__(self, path: str, *, streamed: bool = False) -> None:
        self.path = path
        name, rows = split_slice(path)
        self._file = Path(name)
        self._table: _Table | None = None
        self._is_array = False
        self._begin = Mark()
        self._stop: int | None
        with _file_errors(self._file):
            _check_kind(self._file)
            if self._file.is_dir() or self._file.suffix.lower() == ".parquet":
                self._table = _Table(self._file)
                self._check_not_empty(self._table.size)
                self._start, self._stop, _ = rows.indices(self._table.size)
            else:
                with _open(self._file) as stream, _damage(self._file, "decompressed"):
                    self._is_array = is_array(stream, most=_most_bytes(self._file))
                self._start, self._stop = self._line_bounds(rows, streamed=streamed)
            self.size = _size(self._file)

    @property
    def digest(self) -> str:
        """A hash of sizes and of samples of the bytes: two files that differ in one row in the middle may share it."""
        hasher = hashlib.blake2b(digest_size=16)
        parts = _parts(self._file)
        hasher.update(repr([part.stat().st_size for part in parts]).encode())
        # For a directory: state.json with its fingerprint, and the first and last data.
        for part in dict.fromkeys([parts[0], parts[min(1, len(parts) - 1)], parts[-1]]):
            with part.open("rb") as stream:
                last = max(part.stat().st_size - _SAMPLE_BYTES, 0)
                for offset in dict.fromkeys(last * number // (_SAMPLES - 1) for number in range(_SAMPLES)):
                    stream.seek(offset)
                    hasher.update(stream.read(_SAMPLE_BYTES))
        return hasher.hexdigest()

    def rows(self, mark: Mark | None = None) -> Iterator[tuple[Mark, RawRow]]:
        """The rows from a place on, each with the place behind it."""
        mark = mark or Mark()
        with _file_errors(self._file):
            if (size := _size(self._file)) != self.size:
                raise DataError(
                    f"{self._file} changed while it was read ({self.size} → {size} bytes); leave a file that is "
                    "streamed as it is, and start a new run with this one"
                )
            if self._table is None:
                yield from self._line_rows(mark)
            else:
                for row, raw in self._table.rows(max(self._start, mark.row), self._stop):
                    yield Mark(row), raw

    def _line_rows(self, mark: Mark) -> Iterator[tuple[Mark, RawRow]]:
        from_start = mark == Mark()
        mark = self._begin if from_start else mark
        row = mark.row
        if row == self._stop:
            return
        for number, offset, text in self._texts(mark):
            row += 1
            behind = Mark(row, number, offset)
            if row > self._start:
                where = f"{self._file}, row {number}" if self._is_array else f"{self._file}:{number}"
                yield behind, RawRow(where=where, value=text)
            elif row == self._start:
                self._begin = behind  # the next epoch starts here
            if row == self._stop:  # what is behind the slice is not read
                return
        if from_start and row <= self._start:
            self._check_not_empty(row)

    def _texts(self, mark: Mark) -> Iterator[tuple[int, int, bytes]]:
        """Lines, or elements of an array, from a place on: number from 1, the offset behind, and the text."""
        if not self._is_array:
            yield from _json_lines(self._file, mark)
            return
        name, most = str(self._file), _most_bytes(self._file)
        with _open(self._file) as stream, _damage(self._file, "decompressed"):
            longest = min(_LONGEST, most)
            for row, offset, text in array_items(stream, offset=mark.offset, row=mark.line, longest=longest, name=name):
                _check_unpacked(self._file, offset, most)
                yield row, offset, text

    def _line_bounds(self, rows: slice, *, streamed: bool) -> tuple[int, int | None]:
        start, stop = rows.start or 0, rows.stop
        if start < 0 or (stop is not None and stop < 0):
            if streamed:
                raise DataError(
                    f"{self.path} counts from the end of JSON Lines, which --streaming-data would have to read whole "
                    "for that; count from the beginning, use Parquet, or leave out --streaming-data"
                )
            total = sum(1 for _ in self._texts(Mark()))
            self._check_not_empty(total)
            start, stop, _ = rows.indices(total)
        elif stop is not None and stop <= start:
            raise DataError(f"{self.path} leaves no row; give a slice that holds some of them")
        return start, stop

    def _check_not_empty(self, total: int) -> None:
        """Raise if a file of ``total`` rows, or at least so many, leaves none."""
        if total == 0:
            row = '{"prompt": "2 + 2 ="}'
            raise DataError(f"{self._file} is empty; write one row per prompt, in JSON Lines such as {row}")
        if not range(total)[split_slice(self.path)[1]]:
            raise DataError(f"{self.path} leaves no row: the file has {total}; give a slice that holds some of them")


def split_slice(path: str) -> tuple[str, slice]:
    """Split ``file@[a:b]``; a path without a slice stands for all rows."""
    match = _SLICE.fullmatch(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


def _check_kind(file: Path) -> None:
    state = file.stat()
    mode, size, on_disk = state.st_mode, state.st_size, 512 * state.st_blocks
    if file.suffix.lower() in _COMPRESSED and on_disk > 0 and size > max(2 * on_disk, _UNPACKED_BYTES):
        # What follows the packed rows is passed over, to an end that may be terabytes away. 0: not known, as of s3fs.
        raise DataError(f"{file} has {size:,} bytes, and {on_disk:,} on the disk: it has holes; copy it again")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(
            f"the prompt file {file} is a pipe or a device, which can be read only once; prompts are read more often: "
            "write them into a file, and give that"
        )


@contextlib.contextmanager
def _file_errors(file: Path) -> Iterator[None]:
    """A file that is missing or cannot be read is a `DataError`."""
    try:
        yield
    except FileNotFoundError:
        hint = "; a slice is @[a:b], with whole numbers or nothing for a and b" if "@[" in file.name else ""
        raise DataError(f"the prompt file {file} does not exist; give the path of a prompt file{hint}") from None
    except OSError as error:
        raise DataError(
            f"the prompt file {file} cannot be read: {error.strerror or error}; give a readable one"
        ) from None


@contextlib.contextmanager
def _damage(file: Path, how: str) -> Iterator[None]:
    """Whatever the libraries raise for a damaged file becomes one line; an error of the disk stays what it is."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{file} is damaged or cut off and cannot be {how} ({_reason(error)}); write it again"
        ) from error


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _parquet(file: Path) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        hint = install_hint("slime-rollout", "parquet")
        raise DataError(f"{file} needs pyarrow.parquet, which is not installed; run: {hint}") from None


def _size(file: Path) -> int:
    return sum(part.stat().st_size for part in _parts(file))


def _parts(file: Path) -> list[Path]:
    """The files that a prompt file consists of: of a directory, state.json and then the data."""
    if not file.is_dir():
        return [file]
    state = file / "state.json"
    names = [str(entry["filename"]) for entry in orjson.loads(read_bytes(state))["_data_files"]]
    for name in names:
        if Path(name).name != name or not (file / name).is_file():
            raise DataError(f"{state} names {name!r}, which is not a file in its directory; write the data set again")
    return [state, *(file / name for name in names)]


def _json_lines(file: Path, mark: Mark) -> Iterator[tuple[int, int, bytes]]:
    """Lines that are not blank: number from 1, the offset behind the line, and the line without surrounding space."""
    number, offset, most = mark.line, mark.offset, _most_bytes(file)
    with _open(file) as stream, _damage(file, "decompressed"):
        if offset:
            stream.seek(offset)
        while line := stream.readline(min(_LONGEST, most) + 1):
            for begin, what in _OTHER_FORMATS.items() if number == 0 else ():
                if line.startswith(begin):
                    raise DataError(f"{file} is not JSON Lines but {what}")
            number, offset = number + 1, offset + len(line)
            _check_unpacked(file, offset, most)
            if len(line) > _LONGEST:
                raise DataError(f"{file}:{number}: over {_LONGEST >> 20} MiB long; is this JSON, one object per line?")
            if stripped := (line.removeprefix(BOM) if number == 1 else line).strip():
                yield number, offset, stripped


def _open(file: Path) -> IO[bytes]:
    module = _COMPRESSED.get(file.suffix.lower())
    return file.open("rb") if module is None else importlib.import_module(module).open(file, "rb")


def _most_bytes(file: Path) -> int:
    """Most bytes that a file may unpack to."""
    size = file.stat().st_size
    return max(_UNPACKED_BYTES, _UNPACKED_TIMES * size) if file.suffix.lower() in _COMPRESSED else max(size, _LONGEST)


def _check_unpacked(file: Path, offset: int, most: int) -> None:
    if offset > most and file.suffix.lower() in _COMPRESSED:
        raise DataError(
            f"{file} unpacks to more than {most:,} bytes, over {_UNPACKED_TIMES} times its size; unpack it, and give "
            "what comes out if that is what you expect"
        )


class _Table:
    """A Parquet file, or a directory that ``datasets.save_to_disk`` wrote, of ``size`` rows."""

    def __init__(self, file: Path) -> None:
        if file.is_dir():
            _check_saved(file)
        self._parquet = _parquet(file)
        self._file, self._saved = file, file.is_dir()
        self._how = "read as a directory of datasets.save_to_disk" if self._saved else "read as a Parquet file"
        with self._open() as opened:
            if self._saved:
                _check_bounds(opened)
            self.size: int = opened.num_rows if self._saved else opened.metadata.num_rows
            schema = opened.schema if self._saved else opened.schema_arrow
        self._json_fields = [field for field in schema if _JSON in str(field.type)]
        if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise DataError(f"{file} has several columns of the same name ({', '.join(twice)}); rename or remove some")

    def rows(self, start: int, stop: int | None) -> Iterator[tuple[int, RawRow]]:
        """Rows ``start`` to ``stop``, each with its number from 1; few of them are in memory at a time."""
        stop = self.size if stop is None else stop
        if start >= stop:
            return
        with self._open() as opened:
            batches = _saved_batches(opened, start, stop) if self._saved else _parquet_batches(opened, start, stop)
            for first, batch in batches:
                yield from self._batch_rows(batch, first + 1)
                del batch  # before the next one is read

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        with _damage(self._file, self._how):
            if self._saved:
                yield _mapped(self._file)
            else:
                with self._parquet.ParquetFile(self._file, buffer_size=_BUFFER, pre_buffer=False) as opened:
                    yield opened

    def _batch_rows(self, batch: Any, number: int) -> Iterator[tuple[int, RawRow]]:
        """The rows of a batch, the first with this number. A bad value makes only its own row bad."""
        try:
            values: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
            for row in values:
                row.update({field.name: _parsed(row[field.name], field.type) for field in self._json_fields})
        except _BAD_VALUE as error:
            if batch.num_rows > 1:
                for place in range(batch.num_rows):
                    yield from self._batch_rows(batch.slice(place, 1), number + place)
                return
            where = f"{self._file}, row {number}"
            bad = f"{where}: a value cannot be read: {_reason(error)}; fix it, or leave its column out of the data set"
            yield number, RawRow(where=where, value=DataError(bad))
            return
        for place, value in enumerate(values, number):
            yield place, RawRow(where=f"{self._file}, row {place}", value=value)


def _check_saved(directory: Path) -> None:
    if (directory / "dataset_dict.json").exists():
        names = ", ".join(sorted(path.parent.name for path in directory.glob("*/state.json")))
        raise DataError(f"{directory} holds several data sets ({names}); give the path of one of them")
    if not (directory / "state.json").exists():
        raise DataError(
            f"{directory} is a directory that datasets.save_to_disk did not write (it has no state.json); "
            "give one that it wrote, or a file"
        )


def _mapped(directory: Path) -> Any:
    pyarrow = importlib.import_module("pyarrow")
    tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(part))).read_all() for part in _parts(directory)[1:]]
    return pyarrow.concat_tables(tables) if tables else pyarrow.table({})


def _check_bounds(table: Any) -> None:
    """Check that nothing in a mapped table is said to lie outside it, where reading it would end the process.

    Text that is not UTF-8 makes its own row bad, no other.
    """
    invalid = importlib.import_module("pyarrow").ArrowInvalid
    left = [chunk for column in table.columns for chunk in column.chunks]
    while left:
        array = left.pop()
        array.validate()
        try:
            array.validate(full=True)
        except invalid as error:
            if "UTF8" not in str(error):
                raise
            left += _children(array)


def _children(array: Any) -> list[Any]:
    """The arrays that an array consists of; none if it holds values itself."""
    names = ("storage",), ("keys", "items"), ("indices", "dictionary"), ("values",)
    for parts in names:
        if all(hasattr(array, part) for part in parts):
            return [getattr(array, part) for part in parts]
    return [array.field(number) for number in range(array.type.num_fields)] if hasattr(array, "field") else []


def _saved_batches(table: Any, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    for batch in table.slice(start, stop - start).to_batches(_batch_size(table.num_rows, table.nbytes)):
        yield start, batch
        start += batch.num_rows


def _parquet_batches(opened: Any, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Only row groups that hold some of the rows are read."""
    pool, end = importlib.import_module("pyarrow").default_memory_pool(), 0
    for number in range(opened.num_row_groups):
        group = opened.metadata.row_group(number)
        first, end = end, end + group.num_rows
        if end <= start or first >= stop:
            continue
        size = _batch_size(group.num_rows, group.total_byte_size)
        # Arrow's threads would read ahead, in memory that nothing bounds.
        for batch in opened.iter_batches(batch_size=size, row_groups=[number], use_threads=False):
            if first >= stop:
                break
            low, high = max(start - first, 0), min(stop - first, batch.num_rows)
            if low < high:
                yield first + low, batch.slice(low, high - low)
            first += batch.num_rows
            del batch  # before the next one is read
            pool.release_unused()  # the allocator would keep what was freed, up to 20 MB more from batch to batch


def _batch_size(rows: int, size: int) -> int:
    return max(min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * rows // max(size, 1)), 1)


def _parsed(value: Any, type_: Any) -> Any:
    """A value with the JSON text in it parsed, wherever its Arrow type has such text."""
    if value is None:
        return None
    if getattr(type_, "extension_name", None) == _JSON:
        return orjson.loads(value)
    if isinstance(value, list) and hasattr(type_, "value_type"):
        return [_parsed(item, type_.value_type) for item in value]
    if isinstance(value, dict) and hasattr(type_, "fields"):
        return {field.name: _parsed(value[field.name], field.type) for field in type_.fields}
    return value
