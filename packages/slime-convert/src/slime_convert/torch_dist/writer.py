"""Writing a ``torch_dist`` checkpoint that megatron-core loads, one weight in memory at a time."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from slime_convert.errors import CheckpointError
from slime_convert.progress import OnProgress, no_progress
from slime_convert.torch_dist.layout import COMMON, FORMAT, FORMAT_RECORD, RELEASE, TRACKER, places, stacked

CHECKPOINT_VERSION = 3.0
"""Megatron's version of the checkpoint's content: query, key and value are interleaved by group."""


@dataclass(frozen=True)
class WeightSource:
    """A weight to be written, loaded when its turn comes.

    Attributes:
        name: Of megatron-core's ``GPTModel`` with local layers, with the layer's number in the whole model.
        shape: Its whole shape.
        dtype: Its element type.
        load: Gives the tensor.
        stored_as: Names to store it under, with the layer's number; by default where megatron-core puts ``name``.
        expert: Number of the expert it belongs to, if it does: a layer's experts are stacked too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    stored_as: tuple[str, ...] = ()
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_release(
    directory: str | Path,
    weights: Sequence[WeightSource],
    args: Mapping[str, Any],
    on_progress: OnProgress = no_progress,
    *,
    stack_layers: bool = True,
) -> None:
    """Write a checkpoint of weights without optimizer, Megatron's ``release``, into an existing empty directory.

    Equal layers, and the experts of a layer, are stacked under one key with leading axes, as megatron-core does.

    Args:
        directory: Where ``latest_checkpointed_iteration.txt`` and ``release/`` go.
        weights: The model's weights, every layer of each kind.
        args: Plain values by Megatron's argument names, recorded in ``common.pt``.
        on_progress: Called after each weight.
        stack_layers: Whether the layers are equal. Otherwise each has keys of its own.

    Raises:
        CheckpointError: Layers of one kind are missing or differ in shape.
    """
    root = Path(directory)
    release = root / RELEASE
    release.mkdir()
    _write_tensors(release, _StreamingPlanner(_items(weights, stack_layers), on_progress))
    common = {"args": dict(args), "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    buffer = io.BytesIO()  # torch's own file writer reports a full disk as a RuntimeError
    torch.save(common, buffer)
    (release / COMMON).write_bytes(buffer.getvalue())
    (release / FORMAT).write_text(json.dumps(FORMAT_RECORD), encoding="utf-8")
    (root / TRACKER).write_text(RELEASE, encoding="utf-8")


def _write_tensors(directory: Path, planner: _StreamingPlanner) -> None:
    """The steps of ``torch.distributed.checkpoint.save`` for one process.

    Called one by one because ``save`` turns every error, an interrupt too, into a report for many ranks.
    """
    # Without copying ahead, one tensor is in memory at a time, on machines with a GPU too.
    writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    global_plan, metadata = planner.create_global_plan([local_plan])
    (plan,) = writer.prepare_global_plan(global_plan)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])


@dataclass(frozen=True)
class _Item:
    """A tensor to write, or a pickled ``None`` if ``source`` is ``None``."""

    write: WriteItem
    source: WeightSource | None


def _items(weights: Iterable[WeightSource], stack_layers: bool) -> list[_Item]:
    stacks: dict[str, dict[tuple[int, ...], WeightSource]] = defaultdict(dict)
    for weight in weights:
        for name in weight.stored_as or (_stored_name(weight.name),):
            key, layer = stacked(name) if stack_layers else (name, None)
            index = tuple(number for number in (layer, weight.expert) if number is not None)
            stacks[key][index] = weight
    leading = {key: _leading_axes(key, stack) for key, stack in stacks.items()}
    items = [item for key, stack in stacks.items() for item in _stack_items(key, stack, leading[key])]
    return items + _extra_states({key.rpartition(".")[0]: axes for key, axes in leading.items()})


def _stored_name(name: str) -> str:
    """Where megatron-core puts a weight, with the layer's number."""
    return next(place.keys[0] for place in places(name) if place.layer is None)


def _leading_axes(key: str, stack: Mapping[tuple[int, ...], WeightSource]) -> tuple[int, ...]:
    """Lengths of the axes of layers and experts in front of a stored tensor; none for a weight that is not stacked."""
    shapes = {weight.shape for weight in stack.values()}
    axes = tuple(max(numbers) + 1 for numbers in zip(*stack, strict=True))
    if sorted(stack) != list(itertools.product(*map(range, axes))) or len(shapes) != 1:
        layers = sorted({index[0] for index in stack})
        raise CheckpointError(
            f"the layers of {key} must be 0…{len(layers) - 1} with one shape to be stacked; "
            f"got layers {layers} with shapes {sorted(shapes)}"
        )
    return axes


def _stack_items(key: str, stack: Mapping[tuple[int, ...], WeightSource], leading: tuple[int, ...]) -> Iterator[_Item]:
    for index, weight in sorted(stack.items(), key=lambda entry: entry[0]):
        shape = weight.shape
        yield _tensor_item(
            key, weight, (*leading, *shape), (*index, *(0,) * len(shape)), (*(1,) * len(leading), *shape)
        )


def _tensor_item(
    key: str, weight: WeightSource, size: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> _Item:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
        properties=TensorProperties(dtype=weight.dtype),
        size=torch.Size(size),
    )
    return _Item(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data), weight)


def _extra_states(modules: Mapping[str, tuple[int, ...]]) -> list[_Item]:
    """Empty ``_extra_state`` objects, which megatron-core's modules ask for by name when they load.

    Local layers ask for those of their linear modules, Transformer Engine's also for those of norms and core
    attention. (The latter follow megatron-core's source; they were not run with Transformer Engine.)

    Args:
        modules: Lengths of the axes of layers and experts by module.
    """
    asked = {module: axes for module, axes in modules.items() if module.startswith(("decoder.", "mtp."))}
    for module, axes in list(asked.items()):
        stem, attention, _ = module.partition(".self_attention")
        if attention:
            asked[f"{stem}{attention}.core_attention"] = axes
    items = []
    for module, axes in sorted(asked.items()):
        for index in itertools.product(*map(range, axes)):
            # An object of no axes is shard 0 of 1.
            offset, total = ".".join(map(str, index)) or "0", ".".join(map(str, axes)) or "1"
            key = MetadataIndex(f"{module}._extra_state/shard_{offset}_{total}")
            items.append(_Item(WriteItem(key, WriteItemType.BYTE_IO), None))
    return items


class _StreamingPlanner(DefaultSavePlanner):
    """Gives torch's writer one tensor at a time, loaded when it is written."""

    def __init__(self, items: Sequence[_Item], on_progress: OnProgress) -> None:
        super().__init__(flatten_state_dict=False)
        self._plan = SavePlan([item.write for item in items])
        self._sources = {item.write.index: item.source for item in items}
        self._total = sum(item.source.nbytes for item in items if item.source)
        self._done = 0
        self._on_progress = on_progress

    def create_local_plan(self) -> SavePlan:
        """The plan is the list of items."""
        self.plan = self._plan
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Load what one item writes."""
        source = self._sources[write_item.index]
        if source is None:
            # megatron-core unpickles a list with one entry per object.
            buffer = io.BytesIO()
            torch.save([None], buffer)
            return buffer
        assert write_item.tensor_data is not None
        tensor = source.load()
        if tuple(tensor.shape) != source.shape or tensor.dtype != source.dtype:
            raise CheckpointError(
                f"{source.name} was announced as {source.dtype} {source.shape}, "
                f"but is {tensor.dtype} {tuple(tensor.shape)}"
            )
        self._done += source.nbytes
        self._on_progress(self._done, self._total)
        return tensor.reshape(write_item.tensor_data.chunk.sizes).contiguous()
