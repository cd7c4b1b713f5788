"""Tensors whose elements stay on the disk until they are needed.

A conversion mostly puts blocks of weights into another order: a :class:`LazyTensor` is a list of byte ranges, which
:func:`concat` and :func:`split` rearrange without reading anything. What must be computed (expanded FP8, a transposed
matrix) is a range of bytes that are made when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from slime_convert.errors import CheckpointError, ConvertError, WeightError

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}
"""Bytes of one element, by torch's name of the type."""

_MANY_PIECES, _TINY_BYTES = 2**22, 32


class TensorInfo(NamedTuple):
    """A tensor without its elements. ``dtype`` is torch's name of the element type, such as ``bfloat16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


def tensor_info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A :class:`TensorInfo` whose bytes follow from type and shape; a ValueError if either cannot be."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has type {dtype}; allowed: {', '.join(ITEM_BYTES)}")
    if any(length < 0 for length in shape) or math.prod(shape) >= 2**60:
        raise ValueError(f"{name} has shape {shape}")
    return TensorInfo(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype])


@dataclass(frozen=True, eq=False)
class StoredBytes:
    """Bytes in a file.

    Attributes:
        name: Of the tensor there, for messages.
        checksum: CRC-32 of the bytes, if the file has it.
        error: What to raise if they cannot be read, or are damaged.
    """

    path: Path
    offset: int
    nbytes: int
    name: str
    checksum: int | None = None
    error: type[ConvertError] = CheckpointError


@dataclass(frozen=True, eq=False)
class MadeBytes:
    """Bytes that ``make`` computes when they are needed."""

    nbytes: int
    make: Callable[[], memoryview]


class ByteRange(NamedTuple):
    """A range of some bytes; of ``None`` zeros."""

    source: StoredBytes | MadeBytes | None
    start: int
    nbytes: int


@dataclass(frozen=True)
class LazyTensor:
    """A tensor as the byte ranges that make it up, in C order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[ByteRange, ...]

    @classmethod
    def stored(cls, dtype: str, shape: tuple[int, ...], place: StoredBytes) -> LazyTensor:
        """A tensor that lies in a file as a whole."""
        return cls(dtype, shape, (ByteRange(place, 0, place.nbytes),))

    @classmethod
    def made(cls, dtype: str, shape: tuple[int, ...], make: Callable[[], memoryview]) -> LazyTensor:
        """A tensor that is computed when it is needed."""
        nbytes = tensor_info("", dtype, shape).nbytes
        return cls(dtype, shape, (ByteRange(MadeBytes(nbytes, make), 0, nbytes),))

    @classmethod
    def zeros(cls, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
        """A tensor of zeros."""
        return cls(dtype, shape, (ByteRange(None, 0, tensor_info("", dtype, shape).nbytes),))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        # A file may have a type that torch has not.
        item = ITEM_BYTES.get(self.dtype)
        return sum(piece.nbytes for piece in self.pieces) if item is None else math.prod(self.shape) * item

    def info(self, name: str) -> TensorInfo:
        """Its description, under a name."""
        return TensorInfo(name, self.dtype, self.shape, self.nbytes)

    def reshape(self, *shape: int) -> LazyTensor:
        """The same elements in another shape; one length may be -1. A ValueError for another number of elements."""
        total, known = math.prod(self.shape), math.prod(length for length in shape if length != -1)
        if shape.count(-1) == 1 and known > 0:
            shape = tuple(total // known if length == -1 else length for length in shape)
        if -1 in shape or math.prod(shape) != total:
            raise ValueError(f"{self.shape} cannot be reshaped to {shape}")
        return replace(self, shape=shape)


class Cursor:
    """Takes a tensor's bytes from front to back."""

    def __init__(self, pieces: Iterable[ByteRange]) -> None:
        self._rest = (piece for piece in pieces if piece.nbytes)
        self._left = next(self._rest, None)

    def take(self, nbytes: int) -> Iterator[ByteRange]:
        """The ranges of the next bytes; fewer at the end."""
        while nbytes and self._left is not None:
            source, start, size = self._left
            taken = min(nbytes, size)
            yield ByteRange(source, start, taken)
            self._left = ByteRange(source, start + taken, size - taken) if taken < size else next(self._rest, None)
            nbytes -= taken


def _merged(pieces: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """The same bytes, neighbouring ranges of one source joined."""
    merged: list[ByteRange] = []
    for piece in pieces:
        source, start, size = merged[-1] if merged else (None, 0, 0)
        if merged and source is piece.source and (start + size == piece.start or source is None):
            merged[-1] = ByteRange(source, start, size + piece.nbytes)
        else:
            merged.append(piece)
    return tuple(merged)


def _bounded(blocks: int, parts: int, nbytes: int) -> range:
    """Counts blocks: none without bytes, however long the other axes are. A WeightError if they are of a few bytes
    each and so many that a list of their pieces would be far larger than the tensor."""
    if blocks * parts > _MANY_PIECES and blocks * parts * _TINY_BYTES > nbytes > 0:
        raise WeightError(f"{nbytes} bytes would be put together from {blocks * parts} pieces; use another model")
    return range(blocks if nbytes else 0)


def concat(parts: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Tensors joined along an axis; a ValueError if they differ in type, or in a length of another axis."""
    first = parts[0]
    before, behind = first.shape[:axis], first.shape[axis + 1 :]
    kinds = {(part.dtype, part.shape[:axis], part.shape[axis + 1 :]) for part in parts}
    if len(kinds) != 1 or axis >= len(first.shape):
        raise ValueError(f"cannot join {', '.join(f'{part.dtype} {part.shape}' for part in parts)} along axis {axis}")
    blocks = _bounded(math.prod(before), len(parts), sum(part.nbytes for part in parts))
    shares = [(Cursor(part.pieces), part.nbytes // len(blocks) if blocks else 0) for part in parts]
    pieces = (piece for _ in blocks for cursor, nbytes in shares for piece in cursor.take(nbytes))
    length = sum(part.shape[axis] for part in parts)
    return LazyTensor(first.dtype, (*before, length, *behind), _merged(pieces))


def split(whole: LazyTensor, lengths: Sequence[int], axis: int = 0) -> list[LazyTensor]:
    """A tensor cut along an axis into parts of some lengths; a ValueError if they do not add up."""
    if axis >= len(whole.shape) or sum(lengths) != whole.shape[axis] or min(lengths, default=0) < 0:
        raise ValueError(f"cannot cut a tensor of shape {whole.shape} along axis {axis} into {list(lengths)}")
    before, behind = whole.shape[:axis], whole.shape[axis + 1 :]
    unit = math.prod(behind) * ITEM_BYTES[whole.dtype]
    cursor = Cursor(whole.pieces)
    parts: list[tuple[int, list[ByteRange]]] = [(length, []) for length in lengths]
    for _ in _bounded(math.prod(before), len(parts), whole.nbytes):
        for length, pieces in parts:
            pieces.extend(cursor.take(length * unit))
    return [LazyTensor(whole.dtype, (*before, length, *behind), _merged(pieces)) for length, pieces in parts]


def narrow(whole: LazyTensor, axis: int, start: int, length: int) -> LazyTensor:
    """A tensor's elements from ``start`` on along an axis; a ValueError if they lie outside of it."""
    size = whole.shape[axis] if axis < len(whole.shape) else 0
    if size and (start, length) == (0, size):
        return whole
    return split(whole, (start, length, size - start - length), axis)[1]
