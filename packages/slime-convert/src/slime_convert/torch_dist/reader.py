"""Reading a ``torch_dist`` checkpoint weight by weight, whatever parallelism wrote it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime_convert import plain_pickle
from slime_convert.errors import CheckpointError
from slime_convert.formats import TORCH_DIST, detect
from slime_convert.torch_dist.headers import read_arguments
from slime_convert.torch_dist.layout import METADATA, Place, is_optimizer, places


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
        self._storage = FileSystemReader(self.directory)
        self._storage.set_up_storage_reader(metadata, is_coordinator=True)

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
        try:
            target = torch.empty(sizes, dtype=record.properties.dtype)
            self._storage.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        except Exception as error:  # as above
            raise CheckpointError(
                f"cannot read {key} from {self.directory} ({error!r}); use another checkpoint"
            ) from error
        return target.reshape(sizes[len(stacked) :])

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


class _IntoTensor(LoadPlanner):
    """Copies what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing to set up: the plan is made by the reader."""

    def create_local_plan(self) -> LoadPlan:
        """The reader makes the plan."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """There is one process."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Only tensors are read."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that an item fills."""
        part = self._target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The item is in place already."""


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
