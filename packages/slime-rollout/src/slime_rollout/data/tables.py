"""Tables of prompts: Parquet files, and directories that ``datasets.save_to_disk`` wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_rollout.data.extras import needed
from slime_rollout.data.rows import RawRow

# Arrow's name of columns of JSON text, as datasets writes objects whose fields differ from row to row.
_JSON = "arrow.json"
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1000, 4 << 20  # most that becomes Python objects together, of usual rows
_BUFFER = 1 << 20  # bytes of a column that are read at once; otherwise all of a row group are
# What single values raise that Python cannot hold: text that is no UTF-8, maps with a key twice, times far away.
_BAD_VALUE = (ValueError, KeyError, OverflowError)


def read_parquet(file: Path, rows: slice) -> tuple[int, Iterator[RawRow]]:
    """Rows of a Parquet file. Only row groups that hold some of them are read.

    Args:
        file: Its path.
        rows: Which of them; without a step.

    Returns:
        How many there are in all, and the chosen ones.

    Raises:
        DataError: The file is none of Parquet, or damaged; also while iterating.
        OSError: The file cannot be read.
    """
    parquet = needed("pyarrow.parquet", extra="parquet", file=file)
    file.open("rb").close()  # so that a missing file is told as for every format
    with _damage_told(file, "a Parquet file"), _open(parquet, file) as opened:
        total = opened.metadata.num_rows
        names = opened.schema_arrow.names
        packed = [field for field in opened.schema_arrow if _JSON in str(field.type)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{file} has several columns of the same name ({', '.join(twice)}); rename or remove some")
    start, stop, _ = rows.indices(total)

    def chosen() -> Iterator[RawRow]:
        with _damage_told(file, "a Parquet file"), _open(parquet, file) as opened:
            first = 0
            for number in range(opened.num_row_groups):
                size = opened.metadata.row_group(number).num_rows
                low, high = max(start - first, 0), min(stop - first, size)
                if low < high:
                    for place, batch in _parts(opened, number, low, high):
                        yield from _batch_rows(batch, packed, f"{file}, row", first + place + 1)
                first += size

    return total, chosen()


def _open(parquet: Any, file: Path) -> Any:
    return parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)


def _parts(opened: Any, number: int, low: int, high: int) -> Iterator[tuple[int, Any]]:
    """Rows ``low`` to ``high`` of a row group in batches, each with its place in the group, few in memory at once."""
    group, first = opened.metadata.row_group(number), 0
    size = min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * group.num_rows // max(group.total_byte_size, 1))
    # Arrow's threads would read ahead, in memory that nothing bounds.
    for batch in opened.iter_batches(batch_size=max(size, 1), row_groups=[number], use_threads=False):
        if first >= high:
            return
        begin, end = max(low - first, 0), min(high - first, batch.num_rows)
        if begin < end:
            yield first + begin, batch.slice(begin, end - begin)
        first += batch.num_rows


def _batch_rows(batch: Any, packed: list[Any], what: str, number: int) -> Iterator[RawRow]:
    """The rows of a batch; the first is called ``what number``. If one has a bad value, that one alone is bad."""
    try:
        values = _unpacked_rows(batch, packed)
    except _BAD_VALUE as error:
        if batch.num_rows == 1:
            yield RawRow(where=f"{what} {number}", value=_bad_value(f"{what} {number}", error))
            return
        for place in range(batch.num_rows):
            yield from _batch_rows(batch.slice(place, 1), packed, what, number + place)
        return
    for place, value in enumerate(values, number):
        yield RawRow(where=f"{what} {place}", value=value)


def _unpacked_rows(batch: Any, packed: list[Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        row.update({field.name: _unpacked(row[field.name], field.type) for field in packed})
    return rows


def _bad_value(where: str, error: Exception) -> DataError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return DataError(f"{where}: a value cannot be read: {reason}; mend it, or leave its column out of the data set")


def read_saved(directory: Path, rows: slice) -> tuple[int, Iterator[RawRow]]:
    """Rows of a data set that ``datasets.save_to_disk`` wrote.

    Args:
        directory: Where it is.
        rows: Which of them; without a step.

    Returns:
        How many there are in all, and the chosen ones.

    Raises:
        DataError: The directory holds no data set, several, or a damaged one; also while iterating.
    """
    if (directory / "dataset_dict.json").exists():
        names = ", ".join(sorted(path.parent.name for path in directory.glob("*/state.json")))
        raise DataError(f"{directory} holds several data sets ({names}); give the path of one of them")
    if not (directory / "state.json").exists():
        raise DataError(
            f"{directory} is a directory that datasets.save_to_disk did not write (it has no state.json); "
            "give one that it wrote, or a file"
        )
    datasets = needed("datasets", extra="datasets", file=directory)
    with _damage_told(directory, "a directory of datasets.save_to_disk"):
        # An empty data set is saved as no file at all, which load_from_disk cannot read back.
        if orjson.loads((directory / "state.json").read_bytes()).get("_data_files") == []:
            return 0, iter(())
        data = datasets.load_from_disk(str(directory))
    start, stop, _ = rows.indices(len(data))
    data = data.with_format(None)

    def chosen() -> Iterator[RawRow]:
        place = start
        with _damage_told(directory, "a directory of datasets.save_to_disk"):
            while place < stop:
                try:
                    for value in data.select(range(place, stop)):
                        place += 1
                        yield RawRow(where=f"{directory}, row {place}", value=value)
                except _BAD_VALUE as error:  # of the next row; those behind it need a new iterator
                    place += 1
                    where = f"{directory}, row {place}"
                    yield RawRow(where=where, value=_bad_value(where, error))

    return len(data), chosen()


def _unpacked(value: Any, type_: Any) -> Any:
    """A value whose Arrow type has JSON text somewhere in it, with that text read."""
    if value is None:
        return None
    if getattr(type_, "extension_name", None) == _JSON:
        return orjson.loads(value)
    if isinstance(value, list) and hasattr(type_, "value_type"):
        return [_unpacked(item, type_.value_type) for item in value]
    if isinstance(value, dict) and hasattr(type_, "fields"):
        return {field.name: _unpacked(value[field.name], field.type) for field in type_.fields}
    return value


@contextlib.contextmanager
def _damage_told(path: Path, what: str) -> Iterator[None]:
    """Whatever pyarrow, datasets and the decoders beneath them make of a damaged file becomes one line."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} cannot be read as {what}: {reason}; write it again") from error
