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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from slime_convert.errors import CheckpointError
from slime_convert.progress import OnProgress, no_progress
from slime_convert.torch_dist.layout import (
    COMMON,
    FORMAT,
    FORMAT_RECORD,
    METADATA,
    RELEASE,
    TRACKER,
    places,
    stacked,
)
from slime_convert.torch_dist.parts import Part, PartsWriter

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
    part_bytes: int | None = None,
    state: Path | None = None,
) -> None:
    """Write a checkpoint of weights without optimizer, Megatron's ``release``, into an existing directory.

    Equal layers, and the experts of a layer, are stacked under one key with leading axes, as megatron-core does.

    Args:
        directory: Where ``latest_checkpointed_iteration.txt`` and ``release/`` go.
        weights: The model's weights, every layer of each kind.
        args: Plain values by Megatron's argument names, recorded in ``common.pt``.
        on_progress: Told the bytes that stay, then those that are written after each weight.
        stack_layers: Whether the layers are equal. Otherwise each has keys of its own.
        part_bytes: Largest file, in bytes of tensors; a single larger tensor makes a file of its own. By default a
            sixty-fourth of the whole, at least 64 MiB and at most 2 GiB.
        state: An existing directory that keeps what is known of finished files. Called again with it and the same
            weights, they stay if their checksums are right, and their weights are not loaded again.

    Raises:
        CheckpointError: Layers of one kind are missing or differ in shape.
        OSError: The disk is full, or cannot be written.
    """
    root = Path(directory)
    release = root / RELEASE
    release.mkdir(exist_ok=True)
    (release / METADATA).unlink(missing_ok=True)  # it is written last
    _write_tensors(release, _items(weights, stack_layers), part_bytes, state, on_progress)
    common = {"args": dict(args), "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    buffer = io.BytesIO()  # torch's own file writer reports a full disk as a RuntimeError
    torch.save(common, buffer)
    (release / COMMON).write_bytes(buffer.getvalue())
    (release / FORMAT).write_text(json.dumps(FORMAT_RECORD), encoding="utf-8")
    (root / TRACKER).write_text(RELEASE, encoding="utf-8")


def _write_tensors(
    directory: Path, items: Sequence[_Item], part_bytes: int | None, state: Path | None, on_progress: OnProgress
) -> None:
    """The steps of ``torch.distributed.checkpoint.save``, for as many ranks as there are to be files.

    Called one by one because ``save`` turns every error, an interrupt too, into a report for many ranks.
    """
    total = sum(item.nbytes for item in items)
    largest = part_bytes or min(max(total // 64, 64 * 2**20), 2 * 2**30)
    planner = _StreamingPlanner(items)
    writer = PartsWriter(directory)
    planner.set_up_planner({}, None, is_coordinator=True)
    writer.set_up_storage_writer(True)
    global_plan, metadata = planner.create_global_plan(_plans(items, largest))
    parts = [Part(directory, plan, state) for plan in writer.prepare_global_plan(global_plan)]
    kept = {part.name for part in parts if part.is_finished()}
    sizes = {item.write.index: item.nbytes for item in items}
    done = sum(sizes[write.index] for part in parts if part.name in kept for write in part.plan.items)
    on_progress(done, total)
    for part in parts:
        if part.name in kept:
            continue
        for index in writer.write_part(part, planner):
            if sizes[index]:
                done += sizes[index]
                on_progress(done, total)
    writer.finish(metadata, [part.results() for part in parts])


def _plans(items: Iterable[_Item], largest: int) -> list[SavePlan]:
    plans: list[list[WriteItem]] = [[]]
    room = largest
    for item in items:
        if plans[-1] and item.nbytes > room:
            plans.append([])
            room = largest
        plans[-1].append(item.write)
        room -= item.nbytes
    return [SavePlan(plan) for plan in plans]


@dataclass(frozen=True)
class _Item:
    """A tensor to write, or a pickled ``None`` if ``source`` is ``None``."""

    write: WriteItem
    source: WeightSource | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.source.nbytes if self.source else 0


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
    """Gives torch's writer each tensor when it is written."""

    def __init__(self, items: Sequence[_Item]) -> None:
        super().__init__(flatten_state_dict=False)
        self._sources = {item.write.index: item.source for item in items}

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
        return tensor.reshape(write_item.tensor_data.chunk.sizes).contiguous()
