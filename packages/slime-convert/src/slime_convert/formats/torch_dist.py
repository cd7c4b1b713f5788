"""Reading a ``torch_dist`` checkpoint weight by weight, whatever parallelism wrote it.

``latest_checkpointed_iteration.txt`` names a directory, ``release`` (converted weights) or a step (``iter_0000010``),
with ``.metadata`` (which tensor lies where), ``__*_*.distcp`` (the tensors), ``common.pt`` (plain values, among them
the model's arguments) and ``metadata.json`` (the format's name).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from slime_convert.errors import CheckpointError
from slime_convert.files import file_inside, read_file, refuse_missing
from slime_convert.files.tensors import ITEM_BYTES, LazyTensor, TensorInfo, concat, narrow, tensor_info
from slime_convert.formats.checkpoint import Weights, plain_arguments
from slime_convert.formats.pickles import ForeignNameError, Name, Obj, PickleError, loads
from slime_convert.formats.torch_dist_names import COMMON, METADATA, StoredPlace, is_optimizer, layers_under, places
from slime_convert.formats.torch_file import MAX_PICKLE_BYTES, TorchFile, sizes
from slime_convert.mapping import WeightMap

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *(f"torch {name}" for name in ("Size", "device", "complex32", "complex128", "float4_e2m1fn_x2", *ITEM_BYTES)),
    "torch.serialization _get_layout",
    "collections OrderedDict",
    *(f"pathlib{part} {kind}" for part in ("", "._local") for kind in ("PosixPath", "PurePosixPath")),
    *(f"torch.distributed.checkpoint.filesystem {name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"{_METADATA_MODULE} {name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_METADATA_MODULE} {kind}StorageMetadata" for kind in ("Tensor", "Bytes", "Chunk")),
    # Megatron-core keeps every rank's plan to save.
    *(f"torch.distributed.checkpoint.planner {name}" for name in ("SavePlan", "WriteItem", "WriteItemType")),
    *(f"torch.distributed.checkpoint.planner {kind}WriteData" for kind in ("Tensor", "BytesIO")),
    *(f"megatron.core.dist_checkpointing.strategies.torch {name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    # Of torch before 2.2.
    "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
}
"""All that the description of a checkpoint names, but for its :data:`_ENUMS`."""
_ENUMS = {
    f"{_METADATA_MODULE} _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
}

_Index = tuple[int, ...]
_OVERLAPS = 64  # parts that a block may be put together from, for each part that there is


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor: where it begins and ends on each axis."""

    begin: _Index
    end: _Index

    def overlaps(self, begin: _Index, end: _Index) -> bool:
        return all(a < d and c < b for a, b, c, d in zip(begin, end, self.begin, self.end, strict=True))


@dataclass(frozen=True)
class _Stored:
    """A tensor in the checkpoint, and its blocks by the layer in which they begin (0 if blocks span layers)."""

    info: TensorInfo
    chunks: Mapping[int, Sequence[_Chunk]]
    by_layer: bool


def recorded_arguments(directory: Path) -> dict[str, Any]:
    """Megatron's arguments as one iteration records them, plain values only; none if it records none."""
    return plain_arguments(_common(directory).get("args"))


def _common(directory: Path) -> Mapping[str, Any]:
    content = TorchFile(directory, COMMON).content()
    return content if isinstance(content, dict) else {}


def check_metadata(directory: Path, *, is_read: bool = False) -> None:
    """Refuse a description of one iteration that torch, which runs what it names, must not get (CheckpointError).

    Where it ``is_read`` then, it must describe tensors, too: torch logs what it cannot use.
    """
    described = _metadata(directory)
    if not is_read:
        return
    try:
        state = _state(described, "Metadata")
        if not all(isinstance(state.get(part), dict) for part in ("state_dict_metadata", "storage_data")):
            raise ValueError("it lacks a part")
    except ValueError as error:
        raise CheckpointError(f"cannot read {directory / METADATA} ({error}); the checkpoint is damaged") from error


class TorchDistWeights(Weights):
    """The weights of one iteration of a ``torch_dist`` checkpoint, stacks of layers taken apart.

    A :class:`CheckpointError` if it cannot be read.
    """

    naming = "megatron"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stored, self._places = _read_metadata(directory)
        self.files = _check_files(directory, self._places.values())
        common = _common(directory)
        self.arguments = plain_arguments(common.get("args"))
        if not self.arguments:
            what = "so nothing says that the checkpoint is of the model that config.json describes"
            self.notes = [f"{directory / COMMON} records no arguments of Megatron's, {what}"]
        step = common.get("iteration")
        self.step = step if isinstance(step, int) else None
        untied = self.arguments.get("untie_embeddings_and_output_weights")
        self.tied = None if untied is None else not untied
        self.stored = {key: stored.info for key, stored in self._stored.items() if not is_optimizer(key)}
        self.optimizer = [stored.info for key, stored in self._stored.items() if is_optimizer(key)]
        self.tensors = _layers_of(self.stored)

    def named(self, weight_map: WeightMap) -> dict[str, TensorInfo]:
        """The weights by megatron-core's names, and all others by key and layer."""
        found: dict[str, TensorInfo] = {}
        taken: set[tuple[str, tuple[int, ...]]] = set()
        for name in weight_map.megatron_names():
            held = [place for place in places(name) if self._holds(place)]
            # One weight may be stored under several keys, for several kinds of model.
            taken |= {(key, place.index) for place in held for key in place.keys}
            if held:
                found[name] = self._info(name, held[0])
        axes = {key: len(index) for key, index in taken}
        left = _layers_of({key: info for key, info in self.stored.items() if key not in axes})
        for key, number in Counter(key for key, _ in taken).items():
            if number < math.prod(self.stored[key].shape[: axes[key]]):
                left[key] = self.stored[key]  # it has more layers than the model
        return found | left

    def tensor(self, name: str) -> LazyTensor:
        """One whole weight; a :class:`CheckpointError` if some of it is missing."""
        for place in places(name):
            if self._holds(place):
                parts = [self._block(key, place.index) for key in place.keys]
                return concat(parts) if parts[1:] else parts[0]
        tried = f"(looked for {', '.join('+'.join(place.keys) for place in places(name))})"
        advice = "use the checkpoint and the config of one model"
        raise CheckpointError(f"{self.directory} has no weight {name} {tried}; {advice}")

    def _holds(self, place: StoredPlace) -> bool:
        index = place.index
        return all(
            key in self.stored
            and len(shape := self.stored[key].shape) >= len(index)
            and all(number < length for number, length in zip(index, shape, strict=False))
            for key in place.keys
        )

    def _info(self, name: str, place: StoredPlace) -> TensorInfo:
        infos = [self.stored[key] for key in place.keys]
        shape = infos[0].shape[len(place.index) :]
        if len(infos) > 1:
            shape = (sum(info.shape[0] for info in infos), *shape[1:])
        return tensor_info(name, infos[0].dtype, shape)

    def _block(self, key: str, index: tuple[int, ...]) -> LazyTensor:
        """The tensor under a key at an index of its leading axes, layer and expert."""
        stored = self._stored[key]
        shape = stored.info.shape
        begin = (*index, *(0,) * (len(shape) - len(index)))
        end = (*(number + 1 for number in index), *shape[len(index) :])
        if stored.by_layer and index:
            chunks = stored.chunks.get(index[0], ())
        else:
            chunks = [chunk for some in stored.chunks.values() for chunk in some]
        try:
            whole = _Assembly(self, key, chunks).block(begin, end, chunks)
        except ValueError as error:
            what = f"its parts are not blocks of it, or one is missing ({error})"
            advice = "save the checkpoint with torch_dist again, or use another"
            raise CheckpointError(f"cannot read {key} of {self.directory}: {what}; {advice}") from error
        return whole.reshape(*shape[len(index) :])

    def chunk(self, key: str, chunk: _Chunk) -> LazyTensor:
        """A block as a rank wrote it."""
        place = self._places.get((key, chunk.begin))
        if place is None:
            raise CheckpointError(f"{self.directory / METADATA} is damaged: it lacks the place of {key}; use another")
        name = key + (f" at {chunk.begin}" if any(chunk.begin) else "")
        try:
            file = TorchFile(self.directory, place.file, place[1:])
            tensor = file.tensor(file.content(), name)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {name}: {error}") from error
        shape = tuple(end - begin for begin, end in zip(chunk.begin, chunk.end, strict=True))
        wanted = self._stored[key].info.dtype
        if tensor is None or (tensor.dtype, tensor.shape) != (wanted, shape):
            found = "something else" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            what = f"it is {found}, not {wanted} {shape}"
            raise CheckpointError(f"cannot read {name} from {file.path}: {what}; use another checkpoint")
        return tensor


class _Assembly:
    """Puts a block of a tensor together from the blocks that ranks wrote."""

    def __init__(self, weights: TorchDistWeights, key: str, chunks: Sequence[_Chunk]) -> None:
        self._weights, self._key = weights, key
        self._loaded: dict[_Chunk, LazyTensor] = {}
        self._budget = _OVERLAPS * (len(chunks) + 1)

    def block(self, begin: _Index, end: _Index, chunks: Iterable[_Chunk]) -> LazyTensor:
        """The elements from ``begin`` to ``end``; a ValueError if the chunks do not make them up."""
        shape = tuple(b - a for a, b in zip(begin, end, strict=True))
        if not math.prod(shape):
            return LazyTensor(self._weights.stored[self._key].dtype, shape, ())
        chunks = [chunk for chunk in chunks if chunk.overlaps(begin, end)]
        for axis, (first, last) in enumerate(zip(begin, end, strict=True)):
            ends = (at for chunk in chunks for at in (chunk.begin[axis], chunk.end[axis]))
            cuts = sorted({first, last, *(at for at in ends if first < at < last)})
            if len(cuts) > 2:
                return concat(list(self._along(axis, cuts, begin, end, chunks)), axis)
        if len(chunks) != 1:
            raise ValueError("parts overlap" if chunks else f"nothing from {begin} to {end}")
        (chunk,) = chunks
        if chunk not in self._loaded:
            self._loaded[chunk] = self._weights.chunk(self._key, chunk)
        part = self._loaded[chunk]
        for axis, (first, last, at) in enumerate(zip(begin, end, chunk.begin, strict=True)):
            part = narrow(part, axis, first - at, last - first)
        return part

    def _along(
        self, axis: int, cuts: list[int], begin: _Index, end: _Index, chunks: Sequence[_Chunk]
    ) -> Iterator[LazyTensor]:
        """The block between each two neighbouring cuts of an axis."""
        between: dict[int, list[_Chunk]] = defaultdict(list)
        for chunk in chunks:
            first = bisect_left(cuts, max(chunk.begin[axis], cuts[0]))
            for number in range(first, bisect_left(cuts, min(chunk.end[axis], cuts[-1]))):
                between[number].append(chunk)
                self._budget -= 1
                if self._budget < 0:
                    raise ValueError("too many parts")
        for number, (first, last) in enumerate(pairwise(cuts)):
            start, stop = (*begin[:axis], first, *begin[axis + 1 :]), (*end[:axis], last, *end[axis + 1 :])
            yield self.block(start, stop, between[number])


class _Location(NamedTuple):
    file: str
    offset: int
    length: int


_Places = dict[tuple[str, _Index], _Location]


def _metadata(directory: Path) -> Any:
    path = directory / METADATA
    data = read_file(directory, METADATA, CheckpointError, most=MAX_PICKLE_BYTES)
    try:
        return loads(data, allowed=_ALLOWED, enums=_ENUMS)
    except ForeignNameError as error:
        raise CheckpointError(
            f"{path} names {error}, which describes no checkpoint and may run code when torch loads it; nothing was "
            "run: do not use it with other tools either, and get the checkpoint from its maker"
        ) from None
    except (PickleError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); the checkpoint is damaged, use another") from error


def _read_metadata(directory: Path) -> tuple[dict[str, _Stored], _Places]:
    """Every tensor by its key on disk, and where each block lies, by key and the block's beginning."""
    path = directory / METADATA
    described = _metadata(directory)
    try:
        state = _state(described, "Metadata")
        records = {
            str(key): _state(record, "TensorStorageMetadata")
            for key, record in state["state_dict_metadata"].items()
            if isinstance(record, Obj) and record.name.endswith(" TensorStorageMetadata")
        }
        lists = [id(record["chunks"]) for record in records.values() if record["chunks"]]
        if len(set(lists)) < len(lists):  # each is laid out again: a small file could ask for any amount of work
            raise ValueError("several tensors have one list of parts")
        stored = {key: _stored(key, record) for key, record in records.items()}
        places: _Places = {}
        for index, location in state["storage_data"].items():
            index, location = _state(index, "MetadataIndex"), _state(location, "_StorageInfo")
            if location.get("transform_descriptors"):
                raise ValueError(f"{index['fqn']} is stored with {location['transform_descriptors']}")
            offset = _numbers(index.get("offset")) if index.get("offset") is not None else ()
            first, length = _numbers((location["offset"], location["length"]))
            if not isinstance(location["relative_path"], str):
                raise ValueError("a file's name is not a text")
            places[str(index["fqn"]), offset] = _Location(location["relative_path"], first, length)
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path} ({error}); the checkpoint is damaged, use another") from error
    held: Counter[str] = Counter()
    for (key, _), place in places.items():
        held[key] += place.length
    for key, tensor in stored.items():
        # So nothing is built that is larger than what lies in the files.
        if held[key] < tensor.info.nbytes:
            found = f"{held[key]} of {tensor.info.nbytes} bytes of {key}"
            raise CheckpointError(f"{directory} is incomplete (a part is missing): it holds {found}; use another")
    return stored, places


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Obj) or not value.name.endswith(f" {kind}") or not isinstance(value.state, dict):
        raise ValueError(f"it holds something else than {kind}")
    return value.state


def _stored(key: str, state: Mapping[str, Any]) -> _Stored:
    properties = state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, Name):
        raise ValueError(f"{key} has no element type")
    info = tensor_info(key, dtype.removeprefix("torch "), _numbers(state["size"]))
    chunks = [_chunk(key, info.shape, _state(chunk, "ChunkStorageMetadata")) for chunk in state["chunks"]]
    by_layer = all(chunk.begin and chunk.end[0] == chunk.begin[0] + 1 for chunk in chunks)
    found: dict[int, list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        found[chunk.begin[0] if by_layer else 0].append(chunk)
    return _Stored(info, found, by_layer)


def _chunk(key: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> _Chunk:
    begin, sizes = _numbers(state["offsets"]), _numbers(state["sizes"])
    if len(begin) != len(shape) or len(sizes) != len(shape):
        raise ValueError(f"a part of {key} has another number of axes")
    return _Chunk(begin, tuple(map(sum, zip(begin, sizes, strict=True))))


def _numbers(value: Any) -> _Index:
    if (numbers := sizes(value)) is None:
        raise ValueError("a size or offset is not a short list of whole numbers from 0 on")
    return numbers


def _check_files(directory: Path, places: Collection[_Location]) -> dict[str, int]:
    """Sizes of the files that hold tensors."""
    needed: dict[str, int] = {}
    for file, offset, length in places:
        needed[file] = max(needed.get(file, 0), offset + length)
    refuse_missing(directory, needed, METADATA, CheckpointError)
    real = {name: file_inside(directory, name, CheckpointError) for name in sorted(needed)}
    found = {name: path.stat().st_size for name, path in real.items()}
    ranges = sorted((real[file], offset, offset + length) for file, offset, length in places if length)
    for (path, _, end), (other, begin, _) in pairwise(ranges):
        if path == other and begin < end:  # else a small file could give any number of weights
            raise CheckpointError(f"{directory / METADATA} names bytes of {path} twice; it is damaged, use another")
    for name, size in found.items():
        if size < needed[name]:
            what = f"is cut off: it has {size} of {needed[name]} bytes"
            raise CheckpointError(f"{directory / name} {what}; copy the checkpoint again, or use another")
    return found


def _layers_of(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {
        name: tensor_info(name, info.dtype, shape)
        for key, info in stored.items()
        for name, shape in layers_under(key, info.shape)
    }
