"""Safetensors files written tensor by tensor: one tensor is held in memory, however large a file grows.

The safetensors library writes a file from tensors that are all in memory. Here the header is written first, from the
types and shapes alone, and each tensor goes to its place when it is ready.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from slime_convert.safetensors_files import INDEX, TORCH_NAMES

DEFAULT_SHARD_BYTES = 5 * 2**30
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


def write_shards(
    directory: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write weights as ``model.safetensors``, or as numbered shards with an index.

    Args:
        directory: Where the files go.
        specs: What will come, in the order of the shards.
        tensors: The tensors of ``specs``, in the same order. Each is asked for when the one before is written.
        max_shard_bytes: Largest shard, in bytes of tensors; a single larger tensor makes a shard of its own.

    Raises:
        ValueError: A tensor is not as its spec says, or there are more than specs.
    """
    shards = _split(specs, max_shard_bytes)
    coming = iter(tensors)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True):
        with (directory / name).open("wb") as file:
            _write_file(file, shard, coming)
    if next(coming, None) is not None:  # what makes them may have something to do after the last
        raise ValueError(f"there are more tensors than the {len(specs)} that were announced")
    if len(shards) > 1:
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for spec in specs:
        if shards[-1] and spec.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.nbytes
    return shards


def _write_file(file: BinaryIO, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> None:
    # Larger elements first, as the library does it: then every tensor lies where its type may be read from memory.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        places[spec.name], end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [places[spec.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for spec in specs:
        tensor = next(tensors)
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{spec.name} must be {spec}, not {tensor.dtype} {tuple(tensor.shape)}")
        file.seek(8 + len(text) + places[spec.name])
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        del tensor  # before the next is made
