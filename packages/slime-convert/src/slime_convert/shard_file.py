"""One safetensors file, written tensor by tensor and continued where it was left.

The safetensors library writes a file from tensors that are all in memory. Here the header comes first, from the types
and shapes alone, and each tensor goes to its place when it is ready. The header has a checksum for each tensor, blank
until that is written (see :mod:`slime_convert.safetensors_files`), so that the file itself tells what is finished.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from slime_convert.checksums import CHUNK_BYTES, write_checked
from slime_convert.safetensors_files import BLANK, CHECKSUM_DIGITS, CHECKSUMS, TORCH_NAMES

_KNOWN = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")
SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {kind: getattr(torch, TORCH_NAMES[kind]) for kind in _KNOWN}
"""Element types that are read and written as tensors, by the names that the safetensors format has for them."""
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Everything about a tensor but its values.

    Attributes:
        name: Its name in the checkpoint.
        dtype: Element type.
        shape: Sizes of its axes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    """Where a tensor and its checksum lie, in bytes from the file's beginning."""

    first: int
    nbytes: int
    checksum: int


class ShardFile:
    """A safetensors file to be begun or continued. It is open within a ``with`` statement.

    Args:
        path: The file.
        specs: The tensors that it will hold.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path = path
        self.names = [spec.name for spec in specs]
        # Larger elements first, as the library does it: then every tensor lies where its type may be read from memory.
        in_file = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        self._header = _header(in_file)
        self._slots = self._header.index(_SLOTS) + len(_SLOTS)  # where the checksums begin
        self._places: dict[str, _Place] = {}
        first = len(self._header)
        for number, spec in enumerate(in_file):
            self._places[spec.name] = _Place(first, spec.nbytes, self._slots + number * CHECKSUM_DIGITS)
            first += spec.nbytes
        self._nbytes = first
        self._file: BinaryIO | None = None

    @property
    def is_open(self) -> bool:
        """Whether tensors can be written."""
        return self._file is not None

    def __enter__(self) -> ShardFile:
        # Unbuffered, so that no checksum is written before its tensor.
        self._file = self.path.open("r+b", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def begin(self) -> list[str]:
        """Write the header, unless the file is there and has it.

        Returns:
            Names of the tensors that the file holds already, judged by their checksums.
        """
        checksums = self._written_checksums()
        if checksums is None:
            self.path.write_bytes(self._header)
            return []
        with self.path.open("rb", buffering=0) as file:
            return [name for name in self.names if _holds(file, self._places[name], checksums)]

    def write(self, spec: TensorSpec, tensor: Tensor) -> None:
        """Write one tensor, then its checksum.

        Raises:
            OSError: The disk is full, or cannot be written.
        """
        assert self._file is not None
        place, descriptor = self._places[spec.name], self._file.fileno()
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        checksum = write_checked(data, lambda block: _write_at(descriptor, block, place.first))
        _write_at(descriptor, memoryview(b"%08x" % checksum), place.checksum)

    def _written_checksums(self) -> bytes | None:
        """The header of the file on disk, if it is of these tensors."""
        if not self.path.is_file() or self.path.stat().st_size > self._nbytes:
            return None
        with self.path.open("rb") as file:
            header = file.read(len(self._header))
        end = self._slots + len(self._places) * CHECKSUM_DIGITS
        same = header[: self._slots] == self._header[: self._slots] and header[end:] == self._header[end:]
        return header if same else None


_SLOTS = f'"{CHECKSUMS}":"'.encode()


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and JSON, as they begin a file; checksums blank.

    Args:
        specs: The tensors in the order in which they lie in the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", CHECKSUMS: BLANK * len(specs)}}
    end = 0
    for spec in specs:
        first, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _holds(file: BinaryIO, place: _Place, header: bytes) -> bool:
    """Whether a file holds a tensor whose checksum stands in its header."""
    written = header[place.checksum : place.checksum + CHECKSUM_DIGITS]
    file.seek(place.first)
    checksum, left = 0, place.nbytes
    if written == BLANK.encode():
        return False
    while left:
        block = file.read(min(left, CHUNK_BYTES))
        if not block:
            return False
        checksum, left = zlib.crc32(block, checksum), left - len(block)
    return written == b"%08x" % checksum


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it: one call of the system writes 2 GiB at most, and less on a disk that is nearly full."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
