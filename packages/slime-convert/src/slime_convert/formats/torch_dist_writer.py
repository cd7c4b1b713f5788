"""A ``torch_dist`` checkpoint that megatron-core loads, laid out for writing.

Equal layers, and the experts of a layer, are stacked under one key with leading axes, as megatron-core does.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_convert.errors import WeightError
from slime_convert.files.tensors import TensorInfo, split, tensor_info
from slime_convert.files.writing import NewTensor, Placed, Segment, TensorFile
from slime_convert.formats.pickles import Name, New, dumps
from slime_convert.formats.torch_dist_names import COMMON, FORMAT, METADATA, places, stacked
from slime_convert.formats.torch_file import object_archive, tensor_archive

CHECKPOINT_VERSION = 3.0
"""Megatron's version of the checkpoint's content: query, key and value are interleaved by group."""

_ALIGNMENT = 64
_EMPTY = object_archive([None])


@dataclass(frozen=True)
class MegatronTensor:
    """A weight to be written.

    Attributes:
        tensor: The weight, named as in megatron-core's ``GPTModel`` with local layers, counted from the model's first.
        stored_as: Names to store it under, with the layer's number; by default where megatron-core puts the weight.
        expert: Number of its expert, if it has one: a layer's experts are stacked too.
        sections: Names and rows of its sections, if each is stored under a separate key.
    """

    tensor: NewTensor
    stored_as: tuple[str, ...] = ()
    expert: int | None = None
    sections: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Release:
    """A checkpoint without optimizer, to be written into one directory: files of tensors, then the others by name."""

    tensors: Sequence[TensorFile]
    others: Mapping[str, bytes]


def new_release(
    directory: Path,
    weights: Sequence[MegatronTensor],
    args: Mapping[str, Any],
    *,
    stack_layers: bool = True,
    part_bytes: int | None = None,
) -> Release:
    """Lay out a checkpoint.

    Args:
        directory: Where the files will be: ``release``.
        weights: The model's weights, every layer of each kind.
        args: Plain values by Megatron's argument names, recorded in ``common.pt``.
        stack_layers: Whether the layers are equal. Otherwise each has separate keys.
        part_bytes: Largest file, in bytes of tensors; a single larger tensor is alone in a file. By default a
            sixty-fourth of the whole, at least 64 MiB and at most 2 GiB.

    Raises:
        WeightError: Layers of one kind are missing, or differ in shape or type.
    """
    stacks: dict[str, dict[tuple[int, ...], NewTensor]] = defaultdict(dict)
    modules: dict[str, str] = {}
    for weight in weights:
        # By default where megatron-core puts a weight, with the layer's number.
        alone = (place.keys[0] for place in places(weight.tensor.info.name) if place.layer is None)
        for name in weight.stored_as or (next(alone),):
            key, layer = stacked(name) if stack_layers else (name, None)
            index = tuple(number for number in (layer, weight.expert) if number is not None)
            for suffix, tensor in _sections(weight):
                stacks[key + suffix][index] = tensor
                modules[key + suffix] = key.rpartition(".")[0]
    axes = {key: _leading_axes(key, stack) for key, stack in stacks.items()}
    total = sum(tensor.info.nbytes for stack in stacks.values() for tensor in stack.values())
    largest = part_bytes or min(max(total // 64, 64 * 2**20), 2 * 2**30)
    parts = [_Part(directory / "__0_0.distcp")]
    for key, stack in stacks.items():
        for index, tensor in sorted(stack.items()):
            if parts[-1].nbytes and parts[-1].nbytes + tensor.info.nbytes > largest:
                parts.append(_Part(directory / f"__{len(parts)}_0.distcp"))
            parts[-1].add(key, index, tensor)
    for key in _extra_states({modules[key]: lengths for key, lengths in axes.items()}):
        parts[-1].add_object(key)
    common = {"args": dict(args), "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    others = {COMMON: object_archive(common), FORMAT: json.dumps(backends).encode()}
    others[METADATA] = dumps(_metadata(stacks, axes, parts))
    files = [TensorFile(part.path, part.end, part.objects, part.tensors) for part in parts]
    return Release(files, others)


def _sections(weight: MegatronTensor) -> list[tuple[str, NewTensor]]:
    """The tensors that a weight is stored as, and what follows the weight's name in their keys."""
    if not weight.sections:
        return [("", weight.tensor)]
    rows, info = [rows for _, rows in weight.sections], weight.tensor.info

    def section(number: int) -> NewTensor:
        part = tensor_info(f"{info.name}.{weight.sections[number][0]}", info.dtype, (rows[number], *info.shape[1:]))
        return NewTensor(part, lambda: split(weight.tensor.load(), rows)[number])

    return [(f".{name}", section(number)) for number, (name, _) in enumerate(weight.sections)]


def _leading_axes(key: str, stack: Mapping[tuple[int, ...], NewTensor]) -> tuple[int, ...]:
    """Lengths of a stored tensor's leading axes, of layers and experts; empty if it is not stacked."""
    axes = tuple(max(numbers) + 1 for numbers in zip(*stack, strict=True))
    kinds = {(tensor.info.dtype, tensor.info.shape) for tensor in stack.values()}
    if len(kinds) != 1:
        shown = ", ".join(f"{dtype} {shape}" for dtype, shape in sorted(kinds))
        advice = "Megatron keeps them in one tensor; save the model with one type for each kind of weight"
        raise WeightError(f"the layers or experts that make up {key} have {shown}, but {advice}")
    if sorted(stack) != list(itertools.product(*map(range, axes))):
        raise WeightError(f"{key} is there for {sorted(stack)}, not for all of {axes} layers and experts")
    return axes


@dataclass
class _Part:
    """One file with tensors, each as ``torch.save`` writes it."""

    path: Path
    nbytes: int = 0
    end: int = 0
    tensors: list[Placed] = field(default_factory=list)
    objects: list[Segment] = field(default_factory=list)
    places: dict[tuple[str, tuple[int, ...] | None], tuple[int, int]] = field(default_factory=dict)

    def add(self, key: str, index: tuple[int, ...], tensor: NewTensor) -> None:
        info = tensor.info
        archive = tensor_archive(info.dtype, (*(1,) * len(index), *info.shape), info.nbytes)
        begin = self.end

        def seal(checksum: int) -> list[Segment]:
            head, tail = archive.seal(checksum)
            return [Segment(begin, head), Segment(begin + archive.offset + info.nbytes, tail)]

        self.tensors.append(Placed(tensor, begin + archive.offset, seal))
        self.nbytes += info.nbytes
        self._take((key, (*index, *(0,) * len(info.shape))), archive.nbytes)

    def add_object(self, key: str) -> None:
        """An empty object: megatron-core unpickles a list with one entry for each object."""
        self.objects.append(Segment(self.end, _EMPTY))
        self._take((key, None), len(_EMPTY))

    def _take(self, index: tuple[str, tuple[int, ...] | None], nbytes: int) -> None:
        self.places[index] = (self.end, nbytes)
        self.end += nbytes + -nbytes % _ALIGNMENT


def _extra_states(modules: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Keys of the ``_extra_state`` objects, which megatron-core's modules ask for by name when they load.

    Local layers ask for those of linear modules, Transformer Engine's also for those of norms and core attention (as
    megatron-core's source says; not run with Transformer Engine). ``modules`` has their axes of layers and experts.
    """
    asked = {module: axes for module, axes in modules.items() if module.startswith(("decoder.", "mtp."))}
    for module, axes in list(asked.items()):
        stem, attention, _ = module.partition(".self_attention")
        if attention:
            asked[f"{stem}.self_attention.core_attention"] = axes
    for module, axes in sorted(asked.items()):
        for index in itertools.product(*map(range, axes)):
            # An object of no axes is shard 0 of 1.
            offset, total = ".".join(map(str, index)) or "0", ".".join(map(str, axes)) or "1"
            yield f"{module}._extra_state/shard_{offset}_{total}"


def _metadata(
    stacks: Mapping[str, Mapping[tuple[int, ...], NewTensor]],
    axes: Mapping[str, tuple[int, ...]],
    parts: Iterable[_Part],
) -> New:
    records: dict[str, New] = {}
    for key, stack in stacks.items():
        info = next(iter(stack.values())).info
        chunks = []
        for index in sorted(stack):
            begin, lengths = (*index, *(0,) * len(info.shape)), (*(1,) * len(index), *info.shape)
            chunks.append(_object("ChunkStorageMetadata", {"offsets": _size(begin), "sizes": _size(lengths)}))
        state = {"properties": _properties(info), "size": _size((*axes[key], *info.shape)), "chunks": chunks}
        records[key] = _object("TensorStorageMetadata", state)
    locations: dict[New, New] = {}
    for part in parts:
        for (key, offset), (first, nbytes) in part.places.items():
            if offset is None:
                records[key] = _object("BytesStorageMetadata")
            place = {"fqn": key, "index": None} | ({} if offset is None else {"offset": _size(offset)})
            location = {"relative_path": part.path.name, "offset": first, "length": nbytes}
            locations[_object("MetadataIndex", place)] = _object("_StorageInfo", location, "filesystem")
    state = {"state_dict_metadata": records, "planner_data": None, "storage_data": locations, "storage_meta": None}
    return _object("Metadata", state)


def _object(name: str, state: Any = None, module: str = "metadata") -> New:
    return New(Name(f"torch.distributed.checkpoint.{module} {name}"), state=state)


def _properties(info: TensorInfo) -> New:
    layout = New(Name("torch.serialization _get_layout"), "torch.strided")
    memory_format = New(Name("torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING"), 0)
    return _object("TensorProperties", (Name(f"torch {info.dtype}"), layout, False, memory_format, False))


def _size(lengths: tuple[int, ...]) -> New:
    return New(Name("torch Size"), lengths)
