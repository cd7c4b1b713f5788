"""How a rank reads its part of a ``torch_dist`` checkpoint: from the files straight into its tensors, and checked.

torch's own reader unpickles every tensor into new memory, which the kernel clears first, copies it from there, and
compares no checksum. Megatron-core then joins into new memory once more what it keeps in parts, as a gated layer's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from slime_convert.errors import CheckpointError as UnreadableError
from slime_convert.files import file_inside, open_file
from slime_convert.files.reading import TensorReader
from slime_convert.files.tensors import LazyTensor, narrow
from slime_convert.formats.torch_file import TorchFile
from slime_megatron.checkpoints.files import memory_of
from slime_megatron.errors import TrainerCheckpointError


@contextlib.contextmanager
def reading_directly(state: dict[str, Any]) -> Iterator[None]:
    """Within the block, Megatron-core reads ``state`` as here where it would as torch does, and runs nothing of a file.

    Megatron-core 0.16.1 takes no reader from outside. One that makes its own elsewhere reads as it does, but for
    objects: torch unpickles them whatever they name.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
        CachedMetadataFileSystemReader,
    )

    dict_list_map_inplace(_joined_in_place, state)
    own: Any = getattr(strategies, "_get_filesystem_reader", None)
    load_bytes = DefaultLoadPlanner.load_bytes

    def reader(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return DirectReader(found.path) if type(found) is CachedMetadataFileSystemReader else found

    def load_plain(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        load_bytes(self, read_item, _plain(value, str(read_item.storage_index.fqn)))

    DefaultLoadPlanner.load_bytes = load_plain  # type: ignore[method-assign]
    if own is not None:
        strategies._get_filesystem_reader = reader
    try:
        yield
    finally:
        DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
        if own is not None:
            strategies._get_filesystem_reader = own


def _plain(value: io.BytesIO, name: str) -> io.BytesIO:
    """An object of a checkpoint as torch may load it without a look: saved again, from what is read without running it.

    Raises:
        TrainerCheckpointError: It is of other types than those that torch and Megatron-core declare safe.
    """
    try:
        found = torch.load(value, map_location="cpu", weights_only=True)  # noqa: TID251  (torch's safe reader)
    except pickle.UnpicklingError as error:
        found_name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"names {found_name[1]}" if found_name else "is not what torch reads safely"
        raise TrainerCheckpointError(f"the object {name} {what}, which may run code, so it was not loaded") from error
    written = io.BytesIO()
    torch.save(found, written)
    written.seek(0)
    return written


def _joined_in_place(value: Any) -> Any:
    """Have a tensor that is kept in parts be the result of joining them where they still lie in it.

    Megatron's joining is the inverse of its splitting, so that no other tensor can be what views of all of it make.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not isinstance(value, ShardedTensorFactory) or value.data is None:
        return value
    whole, join = value.data.detach(), value.merge_fn

    def joined(parts: Any) -> Any:
        found = parts if isinstance(parts, list) else [parts]
        lie_in_it = all(isinstance(part, torch.Tensor) and _share_memory(part, whole) for part in found)
        return whole if lie_in_it and sum(map(torch.numel, found)) == whole.numel() else join(parts)

    return dataclasses.replace(value, merge_fn=joined)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class DirectReader(FileSystemReader):
    """torch's reader of checkpoints, with another way to read the tensors. The metadata is read once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors and objects of the files, and where they lie."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read what this rank asks for, in the order in which it lies in the files.

        Raises:
            ConvertError: A file is cut off or damaged.
            TrainerCheckpointError: A file does not hold what the metadata says.
        """
        wanted: dict[tuple[str, int], list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if place.transform_descriptors:  # such as compressed
                return super().read_data(plan, planner)
            wanted.setdefault((place.relative_path, place.offset), []).append(item)
        with TensorReader(shared=True) as reader:
            for _, items in sorted(wanted.items()):
                self._read(reader, items, planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, reader: TensorReader, items: list[ReadItem], planner: LoadPlanner) -> None:
        """The object or tensor of one place, or the parts of it that are wanted."""
        place = self.storage_data[items[0].storage_index]
        if items[0].type is LoadItemType.BYTE_IO:
            path = file_inside(Path(self.path), place.relative_path, UnreadableError)
            with os.fdopen(open_file(path), "rb") as stream:
                stream.seek(place.offset)
                data = stream.read(place.length)
            for item in items:
                planner.load_bytes(item, io.BytesIO(data))
            return
        name = str(items[0].storage_index.fqn)
        file = TorchFile(Path(self.path), place.relative_path, (place.offset, place.length))
        if (tensor := file.tensor(file.content(), name)) is None:
            raise TrainerCheckpointError(f"{file.path} holds something else than the tensor {name}")
        whole: torch.Tensor | None = None
        for item in items:
            target = planner.resolve_tensor(item).detach()
            ranges = list(zip(item.storage_offsets, item.lengths, strict=True))
            if _is_one_range(item.lengths, tensor.shape):
                part = tensor
                for axis, (start, length) in enumerate(ranges):
                    part = narrow(part, axis, start, length)
                _fill(target, part, reader)
            else:
                whole = reader.load(tensor) if whole is None else whole
                target.copy_(whole[tuple(slice(start, start + length) for start, length in ranges)])
            planner.commit_tensor(item, target)


def _is_one_range(lengths: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a block of a tensor lies in one piece: whole rows, not a column, which would be read row by row."""
    first = next((axis for axis, length in enumerate(lengths) if length != 1), len(lengths))
    return tuple(lengths[first + 1 :]) == tuple(shape[first + 1 :])


def _fill(target: torch.Tensor, source: LazyTensor, reader: TensorReader) -> None:
    """Read a tensor into another of its shape, where it lies as in the file without a copy between."""
    alike = str(target.dtype) == f"torch.{source.dtype}" and target.shape == source.shape
    if alike and target.is_cpu and target.is_contiguous():
        reader.stream(source).fill(memory_of(target).data)
    else:
        target.copy_(reader.load(source))
