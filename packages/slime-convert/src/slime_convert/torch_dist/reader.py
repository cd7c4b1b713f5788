"""Reading a ``torch_dist`` checkpoint weight by weight, whatever parallelism wrote it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime_convert import plain_pickle
from slime_convert.errors import CheckpointError
from slime_convert.formats import TORCH_DIST, detect
from slime_convert.torch_dist.headers import read_arguments
from slime_convert.torch_dist.layout import METADATA, Place, is_optimizer, places
from slime_convert.torch_file import StoredTensor, TorchFile


class TorchDistReader:
    """The weights of a ``torch_dist`` checkpoint; optimizer and random state are skipped.

    Nothing of Megatron is imported, and nothing but plain types is unpickled. Weights are read from disk one by one.

    Args:
        directory: The checkpoint, or one iteration of it.

    Raises:
        CheckpointError: It is no readable ``torch_dist`` checkpoint.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = detect(directory, (TORCH_DIST,)).path
        metadata = _read_metadata(self.directory)
        self._weights = {
            key: record
            for key, record in metadata.state_dict_metadata.items()
            if isinstance(record, TensorStorageMetadata) and not is_optimizer(key)
        }
        self._layers: dict[str, dict[int, list[ChunkStorageMetadata]]] = {}
        self._storage_data = metadata.storage_data or {}

    @property
    def weight_keys(self) -> set[str]:
        """Keys of the model's tensors, as they stand on disk (equal layers are stacked under one key)."""
        return set(self._weights)

    def args(self) -> Mapping[str, Any]:
        """The plain arguments that ``common.pt`` records, by Megatron's names; empty if it records none.

        Raises:
            CheckpointError: ``common.pt`` is missing or damaged.
        """
        return read_arguments(self.directory)

    def find(self, name: str) -> Place:
        """Where a weight lies.

        Raises:
            CheckpointError: The checkpoint has no such weight.
        """
        for place in places(name):
            if all(key in self._weights for key in place.keys):
                return place
        tried = ", ".join("+".join(place.keys) for place in places(name))
        raise CheckpointError(
            f"{self.directory} has no weight {name} (looked for {tried}); "
            "use the checkpoint and the config of one model"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of one weight, without the axes of layers and experts."""
        place = self.find(name)
        sizes = [tuple(self._weights[key].size) for key in place.keys]
        if len(sizes) == 1:
            return sizes[0][len(place.index) :]
        return (sum(size[0] for size in sizes), *sizes[0][1:])

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight."""
        return self._weights[self.find(name).keys[0]].properties.dtype

    def load(self, name: str) -> Tensor:
        """One whole weight.

        Args:
            name: Of megatron-core's ``GPTModel`` with local layers, with the layer's number in the whole model.

        Raises:
            CheckpointError: The weight is missing, or its files are.
        """
        place = self.find(name)
        parts = [self._read(key, place) for key in place.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, key: str, place: Place) -> Tensor:
        record = self._weights[key]
        offsets, sizes = [0] * len(record.size), list(record.size)
        stacked = [(kind, n) for kind, n in (("layer", place.layer), ("expert", place.expert)) if n is not None]
        for axis, (kind, number) in enumerate(stacked):
            if axis >= len(sizes):
                raise CheckpointError(f"{key} of {self.directory} has no axis of {kind}s; use another checkpoint")
            if number >= sizes[axis]:
                raise CheckpointError(
                    f"{key} of {self.directory} has {sizes[axis]} {kind}s; {kind} {number} was asked for"
                )
            offsets[axis], sizes[axis] = number, 1
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        try:
            items = create_read_items_for_chunk_list(key, self._around(key, chunk), [chunk])
            covered = _covered(items)
        except Exception as error:  # what a damaged record says can raise anything
            raise CheckpointError(
                f"cannot tell where {key} of {self.directory} lies ({error!r}): its parts are no blocks of it; "
                "save the checkpoint with torch_dist again, or use another"
            ) from error
        if covered != chunk.sizes.numel():
            raise CheckpointError(
                f"{self.directory} holds {covered} of {chunk.sizes.numel()} elements of {key}; "
                "it is incomplete (a rank's part is missing), use another"
            )
        return self._joined(key, items, sizes).reshape(sizes[len(stacked) :])

    def _joined(self, key: str, items: Sequence[ReadItem], sizes: Sequence[int]) -> Tensor:
        """What some items read, each in its place."""
        dtype = self._weights[key].properties.dtype
        if len(items) == 1:
            return self._part(items[0], dtype)
        target = torch.empty(tuple(sizes), dtype=dtype)
        for item in items:
            place = target
            for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                place = place.narrow(dim, offset, length)
            place.copy_(self._part(item, dtype))
        return target

    def _part(self, item: ReadItem, dtype: torch.dtype) -> Tensor:
        """What one item reads from a stored tensor, whose checksum is compared."""
        index = item.storage_index
        tensor, path = self._stored(index)
        try:
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, offset, length)
        except (RuntimeError, IndexError, ValueError) as error:  # torch's words for what lies outside
            raise _unreadable(index, path, f"it has shape {tuple(tensor.shape)}") from error
        if tensor.dtype != dtype:
            raise _unreadable(index, path, f"it has type {tensor.dtype}, not {dtype}")
        return tensor

    def _stored(self, index: MetadataIndex) -> tuple[Tensor, Path]:
        """A tensor as a rank wrote it, and its file."""
        storage = self._storage_data.get(index)
        if storage is None:
            raise CheckpointError(
                f"{self.directory / METADATA} does not say where {index.fqn} lies; "
                "the checkpoint is damaged, use another"
            )
        path = self.directory / storage.relative_path
        if getattr(storage, "transform_descriptors", None):
            raise _unreadable(index, path, f"it is stored with {', '.join(storage.transform_descriptors)}")
        try:
            stored = TorchFile(path, (storage.offset, storage.length)).content()
            if not isinstance(stored, StoredTensor):
                raise CheckpointError(f"{path} holds something else there; use another checkpoint")
            return stored.load(), path
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {_name(index)}: {error}") from error

    def _around(self, key: str, wanted: ChunkStorageMetadata) -> TensorStorageMetadata:
        """A key's record with those chunks that one layer may lie in: torch looks at each of them for every read."""
        record = self._weights[key]
        if key not in self._layers:
            layers: dict[int, list[ChunkStorageMetadata]] = defaultdict(list)
            if all(len(chunk.sizes) and chunk.sizes[0] == 1 for chunk in record.chunks):
                for chunk in record.chunks:
                    layers[chunk.offsets[0]].append(chunk)
            self._layers[key] = layers
        if not self._layers[key] or wanted.sizes[0] != 1:
            return record
        return dataclasses.replace(record, chunks=self._layers[key].get(wanted.offsets[0], []))


def _covered(items: list[ReadItem]) -> int:
    """Elements that are read, if none is read twice.

    Raises:
        ValueError: Parts overlap.
    """
    starts = np.array([item.dest_offsets for item in items])
    ends = starts + np.array([item.lengths for item in items])
    for number in range(1, len(items)):
        if np.any(np.all((starts[:number] < ends[number]) & (starts[number] < ends[:number]), axis=1)):
            raise ValueError("parts overlap")
    return sum(item.lengths.numel() for item in items)


def _unreadable(index: MetadataIndex, path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"cannot read {_name(index)} from {path} ({why}); use another checkpoint")


def _name(index: MetadataIndex) -> str:
    """A stored tensor's key, and its place under it."""
    return index.fqn + (f" at {tuple(index.offset)}" if index.offset and any(index.offset) else "")


def _read_metadata(directory: Path) -> Metadata:
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = plain_pickle.load(file)
    except Exception as error:  # unpickling damaged bytes can raise anything
        raise CheckpointError(f"cannot read {path} ({error!r}); the checkpoint is damaged, use another") from error
    if not _is_sound(metadata):
        raise CheckpointError(f"{path} holds no torch checkpoint metadata; the checkpoint is damaged, use another")
    return metadata


def _is_sound(metadata: Any) -> TypeGuard[Metadata]:
    """Whether the object that was unpickled has the types that it should, and names files of its directory only."""
    if not isinstance(metadata, Metadata):
        return False
    records, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not (isinstance(records, dict) and all(isinstance(key, str) for key in records) and isinstance(places, dict)):
        return False
    tensors = [record for record in records.values() if isinstance(record, TensorStorageMetadata)]
    return all(map(_is_sound_tensor, tensors)) and all(map(_is_sound_place, places.values()))


def _is_sound_tensor(record: TensorStorageMetadata) -> bool:
    size, chunks = getattr(record, "size", None), getattr(record, "chunks", None)
    dtype = getattr(getattr(record, "properties", None), "dtype", None)
    if not (isinstance(dtype, torch.dtype) and isinstance(size, torch.Size) and isinstance(chunks, list)):
        return False
    corners = [getattr(chunk, name, None) for chunk in chunks for name in ("offsets", "sizes")]
    return all(isinstance(corner, torch.Size) for corner in corners)


def _is_sound_place(place: Any) -> bool:
    path = getattr(place, "relative_path", None)
    return isinstance(path, str) and not path.startswith("/") and ".." not in path.split("/")
