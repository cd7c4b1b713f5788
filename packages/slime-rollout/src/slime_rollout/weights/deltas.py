"""Deltas: what changed from one weight version to the next, to the bit.

A published delta is a directory ``weight_v000123/`` with ``deltas.bin``, the tensors' deltas end to end, and
``index.json``: the XXH3 of what follows, a line break, and a :class:`DeltaIndex` as JSON. It is made from the version
before, or from the first checkpoint, where another dtype is converted and a missing tensor, such as a tied output
layer, counts as zeros. A receiver follows this chain (``base_version``, ``base``) back to what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from slime_core.errors import DamagedError, DataError
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    NewDirectory,
    check_format,
    combined_checksum,
    dtype_name,
    read_record,
    reading,
    tensor_bytes,
    tensor_checksum,
    version_name,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DELTA_INDEX, DELTA_FILE = "index.json", "deltas.bin"
DELTA_FORMAT = 2
OLD_INDEX = "index.slwi"  # of format version 1
_STRETCH = 2**20  # elements that are encoded at a time
_SPARSE = 8  # up to one in so many elements changed: only these are written
_LEVEL = 1  # zstandard's; level 3 makes deltas no smaller and takes up to twice the time


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a published version: its checksums before and after, and its delta's place and XXH3."""

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str
    start: int
    size: int
    checksum: str


class DeltaIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What a published version says about itself.

    Attributes:
        base_version: The version that it was made from; ``None`` for the first checkpoint.
        base: Combined checksum of all tensors before.
        result: Combined checksum of all tensors after.
        tensors: What it changes.
    """

    version: int
    base_version: int | None
    base: str
    result: str
    tensors: dict[str, TensorDelta]
    format_version: int = DELTA_FORMAT

    def read(self, directory: Path, name: str) -> bytes:
        """A tensor's delta, from the directory where versions are published."""
        path, tensor = directory / version_name(self.version) / DELTA_FILE, self.tensors[name]
        with reading(path), path.open("rb") as file:
            file.seek(tensor.start)
            delta = file.read(tensor.size)
        if xxhash.xxh3_128_hexdigest(delta) != tensor.checksum:
            raise DamagedError(f"{path}: the delta of {name} is damaged; publish version {self.version} again")
        return delta


class DeltaWriter(NewDirectory):
    """Writes the deltas of one version."""

    def __init__(self, final: Path) -> None:
        super().__init__(final)
        self.deltas: dict[str, TensorDelta] = {}

    def add(self, name: str, base: torch.Tensor, new: torch.Tensor) -> None:
        """Write what changed in a tensor."""
        delta = encode_delta(base, new)
        with (self.path / DELTA_FILE).open("ab") as file:
            start = file.tell()
            file.write(delta)
        self.deltas[name] = TensorDelta(
            dtype=dtype_name(new.dtype),
            shape=tuple(new.shape),
            base=tensor_checksum(base),
            result=tensor_checksum(new),
            start=start,
            size=len(delta),
            checksum=xxhash.xxh3_128_hexdigest(delta),
        )

    def finish(
        self, version: int, base_version: int | None, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        """Write the index and publish; ``before`` and ``after`` are the checksums of all tensors ever sent."""
        index = DeltaIndex(
            version=version,
            base_version=base_version,
            base=combined_checksum(before),
            result=combined_checksum(after),
            tensors=self.deltas,
        )
        text = msgspec.json.encode(index)
        (self.path / DELTA_INDEX).write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
        self.publish()


def published_versions(directory: Path) -> list[Path]:
    """Directories of all versions that are published, in any format version."""
    return [index.parent for name in (DELTA_INDEX, OLD_INDEX) for index in directory.glob(f"weight_v*/{name}")]


def read_index(directory: Path, version: int) -> DeltaIndex:
    """The index of a published version; an error if it is missing, damaged or of another format version."""
    path = directory / version_name(version) / DELTA_INDEX
    if (old := path.with_name(OLD_INDEX)).exists():
        check_format(old, 1, DELTA_FORMAT)
    with reading(path):
        checksum, _, text = path.read_bytes().partition(b"\n")
        if xxhash.xxh3_128_hexdigest(text).encode() != checksum:
            raise DamagedError(f"{path} is damaged; publish version {version} again")
        index = read_record(path, text, DeltaIndex, DELTA_FORMAT)
    if index.version != version:
        raise DamagedError(f"{path} is the index of version {index.version}; publish version {version} again")
    return index


def first_tensor(first: CheckpointReader, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """What a tensor was in the checkpoint that everything began with, as the base of a delta."""
    return first.read(name).to(dtype) if name in first.names else torch.zeros(shape, dtype=dtype)


class _Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Changes of up to 2^20 elements, packed by Zstandard.

    Attributes:
        gaps: Distances from one changed element to the next, 32 bits each; empty if all elements have a difference.
        differences: New bytes minus old bytes modulo 256; empty if nothing changed.
    """

    gaps: bytes
    differences: bytes


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> bytes:
    """What changed between two versions of a tensor, to the bit: MessagePack with a list of :class:`_Stretch`.

    An optimizer's small step moves a bf16 number to a neighbour: its low byte changes by 1 or so, its high byte rarely
    at all. So bytes are subtracted, and numbers' first, second … bytes lie side by side, which then pack well.

    Raises:
        DataError: The two differ in dtype or shape.
    """
    if (base.dtype, base.shape) != (new.dtype, new.shape):
        raise DataError(f"a delta needs two versions of one tensor, got {_describe(base)} and {_describe(new)}")
    width = min(base.element_size(), 8)
    old_N, new_N = (np.frombuffer(tensor_bytes(tensor), f"<u{width}") for tensor in (base, new))
    parts = (slice(start, start + _STRETCH) for start in range(0, len(old_N), _STRETCH))
    return msgspec.msgpack.encode([_encode_stretch(old_N[part], new_N[part]) for part in parts])


def _encode_stretch(old_N: NDArray[np.unsignedinteger], new_N: NDArray[np.unsignedinteger]) -> _Stretch:
    changed_C = np.flatnonzero(old_N != new_N)
    if not len(changed_C):
        return _Stretch(b"", b"")
    if len(changed_C) * _SPARSE > len(old_N):
        return _Stretch(b"", _pack(_bytes(new_N) - _bytes(old_N)))
    gaps_C = np.diff(changed_C, prepend=-1).astype("<u4")
    return _Stretch(_pack(_bytes(gaps_C)), _pack(_bytes(new_N[changed_C]) - _bytes(old_N[changed_C])))


def apply_delta(base: torch.Tensor, delta: bytes) -> torch.Tensor:
    """The new version, as a new tensor. The caller compares checksums before and after."""
    width = min(base.element_size(), 8)
    result = base.clone(memory_format=torch.contiguous_format)
    bytes_NW = np.frombuffer(tensor_bytes(result), np.uint8).reshape(-1, width)
    for number, stretch in enumerate(msgspec.msgpack.decode(delta, type=list[_Stretch])):
        part_NW = bytes_NW[number * _STRETCH : (number + 1) * _STRETCH]
        if stretch.gaps:
            changed_C = np.cumsum(_unpack(stretch.gaps, 4).view("<u4"), dtype=np.int64) - 1
            part_NW[changed_C] += _unpack(stretch.differences, width)
        elif stretch.differences:
            part_NW += _unpack(stretch.differences, width)
    return result


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _bytes(numbers_N: NDArray[np.unsignedinteger]) -> NDArray[np.uint8]:
    return numbers_N.view(np.uint8).reshape(len(numbers_N), -1)


def _pack(bytes_NW: NDArray[np.uint8]) -> bytes:
    packed: bytes = zstd.compress(np.ascontiguousarray(bytes_NW.T).data, _LEVEL)
    return packed


def _unpack(data: bytes, width: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.frombuffer(zstd.decompress(data), np.uint8).reshape(width, -1).T)
