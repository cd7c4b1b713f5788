"""Samples as arrays: what crosses processes and lies on disk. User-defined functions get :class:`Sample` objects.

Columns map a name to a value per sample (an array ``[S, ...]``) or to a row per sample (:class:`Ragged`). S is the
number of samples, R the response tokens of one. Any name besides these is an extra, carried without being understood:

================================================  =========  ============================================
``index``, ``group_index``                        int64
``trajectory_id``                                 int64      -1: none
``response_length``                               int64      R
``status``                                        uint8      place in :class:`Status`
``remove_sample``                                 bool
``tokens``                                        row int32  prompt and response
``loss_mask``                                     row uint8  R zeros and ones, or no row
``rollout_log_probs``, ``teacher_log_probs``      row f4     R numbers, or no row
``weight_versions``                               row int32  R numbers, or an empty row
``response``, ``label``, ``session_id``           row uint8  UTF-8
``prompt``, ``reward``, ``metadata``,             row uint8  JSON
``train_metadata``
``kept_tokens``, ``routed_experts``               row uint8  text, or no row; no column if no sample has one
================================================  =========  ============================================

Numbers that these types would change are stored as int64 or float64, so that every value comes back to the last bit.

A file of them is an uncompressed ``.npz``, which ``numpy.load(path, allow_pickle=False)`` reads: ``head`` is JSON; a
:class:`Ragged` is its values under its name and its lengths under ``<name>.lengths``. Checksums show damage.
"""

from __future__ import annotations

import array
import dataclasses
import json
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slime_core.errors import DamagedError, DataError, FormatVersionError
from slime_core.files import open_file, whole_file
from slime_core.types.checks import check_plain
from slime_core.types.sample import Sample, Status

FORMAT_VERSION = 1
STATUSES = tuple(Status)

KEPT, ROUTED = "kept_tokens", "routed_experts"
_LENGTHS = ".lengths"
_END, _SPACE, _ZERO, _NINE = b"; 09"
_MOST_DIGITS = 9
_INTEGERS = ("tokens", "weight_versions")
_NUMBERS = ("rollout_log_probs", "teacher_log_probs")
_TEXTS = ("response", "label", "session_id")
_JSON = ("prompt", "reward", "metadata", "train_metadata")
_PER_SAMPLE = ("index", "group_index", "trajectory_id", "response_length", "status", "remove_sample")
_ROWS = (*_INTEGERS, *_NUMBERS, *_TEXTS, *_JSON, "loss_mask")
SAMPLE_COLUMNS = frozenset((*_PER_SAMPLE, *_ROWS))
"""The columns that every :class:`Sample` has; all others but ``kept_tokens`` and ``routed_experts`` are extras."""

# All that numpy, zipfile and json raise on bytes that were altered somewhere.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, ValueError, TypeError, IndexError, OverflowError,
    NotImplementedError, RuntimeError, RecursionError, MemoryError, SyntaxError, tokenize.TokenError,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """A row of values per sample: the rows one after the other, and their lengths [S]; -1 where a sample has no row."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Iterable[NDArray[Any] | None], dtype: DTypeLike | None = None) -> Ragged:
        """The rows of S samples, copied; ``None`` for a missing row."""
        listed = list(rows)
        given = [row for row in listed if row is not None]
        values = np.concatenate(given, dtype=dtype) if given else np.zeros(0, dtype)
        return cls(values, np.array([-1 if row is None else len(row) for row in listed], np.int64))

    @property
    def rows(self) -> list[NDArray[Any] | None]:
        """A view of each row."""
        ends = np.cumsum(np.maximum(self.lengths, 0)).tolist()
        return [
            None if length < 0 else self.values[end - length : end]
            for end, length in zip(ends, self.lengths.tolist(), strict=True)
        ]


Columns = dict[str, Ragged | NDArray[Any]]


def columns_of(samples: Sequence[Sample]) -> Columns:
    """The samples as arrays. Raises DataError if a field is invalid, or a value would not come back as it is."""
    for sample in samples:
        sample.validate(lists=False)
        for name in ("prompt", "metadata", "train_metadata"):
            setattr(sample, name, check_plain(getattr(sample, name), f"sample {sample.index}: {name}"))
    try:
        return _columns_of(samples)
    except (TypeError, ValueError, OverflowError):
        for sample in samples:
            sample.validate()  # says what is wrong with a list, or makes it plain
    try:
        return _columns_of(samples)
    except OverflowError as error:
        raise DataError(f"a number of a sample does not fit 64 bits ({error})") from None


def samples_of(columns: Columns) -> list[Sample]:
    """The reverse of :func:`columns_of`, without extras."""
    fields: dict[str, list[Any]] = {name: _plain(columns[name]) for name in SAMPLE_COLUMNS - {*_TEXTS, *_JSON}}
    for name in (*_TEXTS, *(name for name in (KEPT, ROUTED) if name in columns)):
        fields[name] = [None if row is None else _text(row) for row in ragged(columns, name).rows]
    for name in _JSON:
        fields[name] = json_rows(columns, name)
    fields["status"] = [STATUSES[code] for code in fields["status"]]
    fields["trajectory_id"] = [None if number < 0 else number for number in fields["trajectory_id"]]
    return [Sample.from_dict(dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]


def numbers(columns: Columns, name: str) -> list[Any]:
    """A plain value per sample."""
    column = columns[name]
    return list((column.values if isinstance(column, Ragged) else column).tolist())


def json_rows(columns: Columns, name: str, *, containing: str = "") -> list[Any]:
    """The values of a JSON column, ``None`` where a sample has none; only of the rows ``containing`` a text."""
    texts = [None if row is None else _text(row) for row in ragged(columns, name).rows]
    return [
        None if text is None else json.loads(text)
        for text in texts
        if not containing or (text is not None and containing in text)
    ]


def ragged(columns: Columns, name: str) -> Ragged:
    """A column of rows. Raises DamagedError if it holds a value per sample."""
    column = columns[name]
    if not isinstance(column, Ragged):
        raise DamagedError(f"the column {name} has no lengths; get the samples again")
    return column


def read_kept(where: str, text: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids of all sets, one set after the other, and how many each has, from the text's bytes.

    Raises:
        DataError: Something else than digits, spaces and semicolons is in it, or a number is not a token id.
    """
    is_digit = (text >= _ZERO) & (text <= _NINE)
    is_end = text == _END
    if not (is_digit | is_end | (text == _SPACE)).all():
        raise DataError(f"{where}: kept_tokens may hold token ids, spaces and semicolons only")
    begins = is_digit & ~np.concatenate([[False], is_digit[:-1]])
    ends = np.flatnonzero(is_end)
    before = np.searchsorted(np.flatnonzero(begins), ends)  # ids that begin before each set's end
    words = text.tobytes().replace(b";", b" ").split()
    if words and max(map(len, words)) > _MOST_DIGITS:
        raise DataError(f"{where}: kept_tokens has {max(words, key=len).decode()}, which is not a token id")
    ids = np.array(words, np.bytes_).astype(np.int32) if words else np.zeros(0, np.int32)
    return ids, np.diff(before, prepend=0).astype(np.int32)


def write_npz(path: str | Path, head: dict[str, Any], columns: Columns) -> None:
    """Write columns, whose names hold no dot, to a file, which appears whole or not at all. Its directory must exist.

    Raises:
        DataError: The head is not plain, or a column is not an array of numbers.
    """
    check_plain(head, "head")
    members: dict[str, NDArray[Any]] = {"head": _bytes(_dump(head | {"format_version": FORMAT_VERSION}, "head"))}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            members[name], members[name + _LENGTHS] = column.values, column.lengths
        else:
            members[name] = column
    if objects := [name for name, values in members.items() if values.dtype.hasobject]:
        raise DataError(f"the columns {objects} hold Python objects; give arrays of numbers or bytes")
    with whole_file(Path(path)) as partial, partial.open("wb") as file:
        np.savez(file, **members)  # type: ignore[arg-type]


def read_npz(path: str | Path, what: str) -> tuple[dict[str, Any], Columns]:
    """The reverse of :func:`write_npz`. ``what`` is the file's name in errors, such as ``rollout 3``.

    Raises:
        FormatVersionError: The file is in another version of the format.
        DamagedError: It was cut off or altered, or is something else.
    """
    try:
        with open_file(Path(path)) as file, np.load(file, allow_pickle=False) as members:  # noqa: TID251  (limited below)
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.zip.infolist()):
                raise ValueError("it has packed members, which may be of any size")
            size = os.fstat(file.fileno()).st_size
            head = json.loads(_text(_member(members, "head", size)))
            version = head.pop("format_version")
            if version != FORMAT_VERSION:
                raise FormatVersionError(f"{what}: format_version {version!r}; this slime reads {FORMAT_VERSION}")
            arrays = {name: _member(members, name, size) for name in members.files if name != "head"}
        return head, _joined(arrays)
    except _DAMAGE as error:
        raise DamagedError(f"{what} is cut off, altered or something else ({error}); get it again") from None


def _member(members: Any, name: str, most: int) -> NDArray[Any]:
    """An array of an archive of ``most`` bytes; numpy would allocate whatever its head says."""
    with members.zip.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    if math.prod(shape) * dtype.itemsize > most:
        raise ValueError(f"{name} of the shape {shape} has more bytes than the file")
    array: NDArray[Any] = members[name]
    return array


def _joined(arrays: dict[str, NDArray[Any]]) -> Columns:
    columns: Columns = {}
    for name, values in arrays.items():
        if not name.endswith(_LENGTHS):
            lengths = arrays.get(name + _LENGTHS)
            if lengths is not None and np.maximum(lengths, 0).sum() != len(values):
                raise ValueError(f"{name} has {len(values)} values, its lengths say otherwise")
            columns[name] = values if lengths is None else Ragged(values, lengths)
    if len({len(column.lengths if isinstance(column, Ragged) else column) for column in columns.values()}) > 1:
        raise ValueError("its columns differ in their number of samples")
    return columns


def _columns_of(samples: Sequence[Sample]) -> Columns:
    columns: Columns = {
        name: np.array([getattr(sample, name) for sample in samples], np.int64)
        for name in ("index", "group_index", "response_length")
    }
    ids = [-1 if sample.trajectory_id is None else sample.trajectory_id for sample in samples]
    columns["trajectory_id"] = np.array(ids, np.int64)
    columns["status"] = np.array([STATUSES.index(sample.status) for sample in samples], np.uint8)
    columns["remove_sample"] = np.array([sample.remove_sample for sample in samples], np.bool_)
    for name, least in (("tokens", 0), ("weight_versions", -1)):
        columns[name] = _integers([getattr(sample, name) for sample in samples], least)
    columns["loss_mask"] = _masks([sample.loss_mask for sample in samples])
    for name in _NUMBERS:
        columns[name] = _numbers([getattr(sample, name) for sample in samples])
    some = [name for name in (KEPT, ROUTED) if any(getattr(sample, name) is not None for sample in samples)]
    for name in (*_TEXTS, *_JSON, *some):
        columns[name] = _texts(samples, name)
    return columns


def _texts(samples: Sequence[Sample], name: str) -> Ragged:
    texts: Iterable[str | None] = (getattr(sample, name) for sample in samples)
    if name in _JSON:
        texts = (
            None if (value := getattr(sample, name)) is None else _dump(value, f"sample {sample.index}: {name}")
            for sample in samples
        )
    return Ragged.of([None if text is None else _bytes(text) for text in texts], np.uint8)


def _filled(rows: Sequence[list[Any] | None], out: NDArray[Any], convert: Callable[[list[Any]], Any]) -> Ragged:
    """The rows, converted one at a time, so that what is needed for a moment stays small."""
    end = 0
    for row in rows:
        if row is not None:
            if type(row) is not list:
                raise TypeError("not a list")
            out[end : end + len(row)] = convert(row)
            end += len(row)
    return Ragged(out, _lengths(rows))


def _integers(rows: Sequence[list[int]], least: int) -> Ragged:
    size = sum(map(len, rows))
    try:
        column = _filled(rows, np.empty(size, np.int32), lambda row: array.array("i", row))
    except OverflowError:
        column = _filled(rows, np.empty(size, np.int64), lambda row: array.array("q", row))
    if size and column.values.min() < least:
        raise ValueError("too small")
    return column


def _masks(rows: Sequence[list[int] | None]) -> Ragged:
    size = sum(len(row) for row in rows if row is not None)
    column = _filled(rows, np.empty(size, np.uint8), lambda row: np.frombuffer(bytes(row), np.uint8))
    if size and column.values.max() > 1:
        raise ValueError("neither 0 nor 1")
    return column


def _numbers(rows: Sequence[list[float] | None]) -> Ragged:
    """As float32 if that holds every number to the last bit; a NaN, which equals no NaN, takes float64."""
    size = sum(len(row) for row in rows if row is not None)

    def narrow(row: list[float]) -> NDArray[np.float32]:
        wide = np.frombuffer(array.array("d", row), np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            values = wide.astype(np.float32)
        if not np.array_equal(values, wide):
            raise _InexactError
        return values

    try:
        return _filled(rows, np.empty(size, np.float32), narrow)
    except _InexactError:
        return _filled(rows, np.empty(size, np.float64), lambda row: array.array("d", row))


class _InexactError(Exception):
    """A number needs more than float32."""


def _lengths(rows: Sequence[Sequence[Any] | None]) -> NDArray[np.int64]:
    return np.array([-1 if row is None else len(row) for row in rows], np.int64)


def _plain(column: Ragged | NDArray[Any]) -> list[Any]:
    if isinstance(column, Ragged):
        return [None if row is None else row.tolist() for row in column.rows]
    return list(column.tolist())


def _dump(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:  # an integer of more digits than Python prints
        raise DataError(
            f"{where}: a value does not fit JSON ({error}); keep it out of the metadata, or store it as text"
        ) from None


# Surrogates pass as they are: JSON's own escapes would join two lone ones into one character.
def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _text(row: NDArray[Any]) -> str:
    return row.tobytes().decode("utf-8", "surrogatepass")
