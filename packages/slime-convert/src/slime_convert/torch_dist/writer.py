"""Writing a ``torch_dist`` checkpoint that megatron-core loads, one weight in memory at a time."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from slime_convert.torch_dist.layout import COMMON, FORMAT, FORMAT_RECORD, RELEASE, TRACKER, places

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
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_release(
    directory: str | Path,
    weights: Sequence[WeightSource],
    args: Mapping[str, Any],
    on_progress: OnProgress = no_progress,
) -> None:
    """Write a checkpoint of weights without optimizer, Megatron's ``release``, into an existing empty directory.

    Equal layers are stacked under one key with a leading layer axis, as megatron-core does.

    Args:
        directory: Where ``latest_checkpointed_iteration.txt`` and ``release/`` go.
        weights: The model's weights, every layer of each kind.
        args: Plain values by Megatron's argument names, recorded in ``common.pt``.
        on_progress: Called after each weight.

    Raises:
        CheckpointError: Layers of one kind are missing or differ in shape.
    """
    root = Path(directory)
    release = root / RELEASE
    release.mkdir()
    _write_tensors(release, _StreamingPlanner(_items(weights), on_progress))
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


def _items(weights: Iterable[WeightSource]) -> list[_Item]:
    stacks: dict[str, dict[int, WeightSource]] = defaultdict(dict)
    items: list[_Item] = []
    for weight in weights:
        place = places(weight.name)[0]
        if place.layer is None:
            items.append(_tensor_item(place.keys[0], weight, weight.shape, (0,) * len(weight.shape), weight.shape))
        else:
            stacks[place.keys[0]][place.layer] = weight
    for key, layers in stacks.items():
        items += _stack_items(key, layers)
    modules = {item.write.index.fqn.rpartition(".")[0] for item in items}
    return items + _extra_states(modules, max(map(len, stacks.values()), default=0))


def _stack_items(key: str, layers: Mapping[int, WeightSource]) -> list[_Item]:
    shapes = {weight.shape for weight in layers.values()}
    if sorted(layers) != list(range(len(layers))) or len(shapes) != 1:
        raise CheckpointError(
            f"the layers of {key} must be 0…{len(layers) - 1} with one shape to be stacked; "
            f"got layers {sorted(layers)} with shapes {sorted(shapes)}"
        )
    (shape,) = shapes
    return [
        _tensor_item(key, weight, (len(layers), *shape), (layer, *(0,) * len(shape)), (1, *shape))
        for layer, weight in sorted(layers.items())
    ]


def _tensor_item(
    key: str, weight: WeightSource, size: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> _Item:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
        properties=TensorProperties(dtype=weight.dtype),
        size=torch.Size(size),
    )
    return _Item(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data), weight)


def _extra_states(modules: set[str], num_layers: int) -> list[_Item]:
    """Empty ``_extra_state`` objects, which megatron-core's modules ask for by name when they load.

    Local layers ask for those of their linear modules, Transformer Engine's also for those of norms and core
    attention. (The latter follow megatron-core's source; they were not run with Transformer Engine.)
    """
    stack, attention = "decoder.layers.", "decoder.layers.self_attention"
    modules = {module for module in modules if module.startswith("decoder.")}
    if any(module.startswith(attention) for module in modules):
        modules |= {f"{attention}.core_attention"}
    items = []
    for module in sorted(modules):
        total = num_layers if module.startswith(stack) else 1
        for index in range(total):
            key = MetadataIndex(f"{module}._extra_state/shard_{index}_{total}")
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
