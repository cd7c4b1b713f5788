"""Megatron's legacy ``torch`` checkpoints (``--ckpt-format torch``), read without Megatron and without torch.

``latest_checkpointed_iteration.txt`` names a directory, ``release`` or a step (``iter_0000010``), with one
``mp_rank_…/model_optim_rng.pt`` per tensor-, pipeline- and expert-parallel rank, written by ``torch.save``: the rank's
part of the model, optimizer state, and the training arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from slime_convert.errors import CheckpointError, WeightError
from slime_convert.files.tensors import LazyTensor, TensorInfo, concat
from slime_convert.formats.checkpoint import VOCABULARY_WEIGHTS, Weights, plain_arguments
from slime_convert.formats.pickles import Obj
from slime_convert.formats.torch_dist_names import StoredPlace, places
from slime_convert.formats.torch_file import TorchFile
from slime_convert.mapping import WeightMap

# A rank's file; older Megatron used the second with a distributed optimizer.
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_SHOWN = 8
_SHARING = 2  # weights that may share a byte, as the embedding and the output layer of a tied model do
_MAX_NAME = 10_000  # deeper state is left out: names would grow with the square of the file
_DIRECTORY = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")


class Rank(NamedTuple):
    """A place in the parallel layout."""

    tensor: int
    pipeline: int = 0
    expert: int = 0


class Parallel(NamedTuple):
    """Sizes of the parallel layout that wrote a checkpoint; ``expert_tensor`` is the experts' tensor parallelism."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


def _rank_files(iteration: Path) -> dict[tuple[int, ...], Path]:
    """The ranks' files by the numbers in their directories' names: tensor rank, and pipeline or expert rank or both."""
    found: dict[tuple[int, ...], Path] = {}
    for directory in sorted(iteration.iterdir()):
        if (match := _DIRECTORY.match(directory.name)) is None:
            continue
        path = next((Path(directory.name, name) for name in _FILES if (directory / name).exists()), None)
        if path is None:
            raise CheckpointError(f"{directory} has no {_FILES[0]}; the checkpoint is incomplete, use another")
        found[tuple(int(number) for number in match.groups() if number is not None)] = path
    if len({len(numbers) for numbers in found}) != 1:
        raise CheckpointError(
            f"{iteration} must have directories mp_rank_XX, or all mp_rank_XX_YYY, or all mp_rank_XX_YYY_ZZZ; "
            f"it has {', '.join(path.parent.name for path in found.values()) or 'none'}; use one whole checkpoint"
        )
    return found


def _by_rank(
    files: Mapping[tuple[int, ...], Path], args: Mapping[str, Any], first_stage: bool, iteration: Path
) -> tuple[dict[Rank, Path], Parallel]:
    """Ranks from the numbers in the directories' names, by the recorded arguments, which may be empty.

    A second number alone is the pipeline rank or the expert rank. If the arguments do not say which, it is the expert
    rank where the last file holds the embedding (``first_stage``): no later pipeline stage has it.
    """
    count = len(next(iter(files)))
    is_expert = count == 2 and _size(args, "pipeline_model", 1 if first_stage else 2) == 1
    ranks = {Rank(key[0], 0, key[1]) if is_expert else Rank(*key): path for key, path in files.items()}
    tensor, pipeline, expert = (
        _size(args, f"{kind}_model", 1 + max(getattr(rank, kind) for rank in ranks)) for kind in Rank._fields
    )
    expert_tensor = _size(args, "expert_tensor", tensor)
    if tensor % expert_tensor:
        raise CheckpointError(
            f"{iteration} was saved with expert-tensor-parallel-size {expert_tensor}, which does not divide "
            f"tensor-model-parallel-size {tensor}, so that its ranks overwrote each other; use another"
        )
    held = {(kind, getattr(rank, kind), rank.pipeline) for rank in ranks for kind in ("tensor", "expert")}
    # One by one, and never all: recorded sizes may be any number.
    missing = (
        f"{kind} rank {number} of stage {stage}"
        for kind, size in (("tensor", tensor), ("expert", expert))
        for stage in range(pipeline)
        for number in range(size)
        if (kind, number, stage) not in held
    )
    if found := list(islice(missing, _SHOWN + 1)):
        lost = ", ".join(found[:_SHOWN]) + " and more" * (len(found) > _SHOWN)
        raise CheckpointError(
            f"{iteration} was saved by tensor {tensor} × pipeline {pipeline} × expert {expert} ranks, but has no "
            f"mp_rank_* directory of {lost}; use a whole checkpoint"
        )
    return ranks, Parallel(tensor, pipeline, expert, expert_tensor)


def _size(args: Mapping[str, Any], name: str, default: int) -> int:
    value = args.get(f"{name}_parallel_size")
    return value if isinstance(value, int) and value > 0 else default


_Chunk = Mapping[str, LazyTensor]
_CHECKPOINT_VERSION = 3.0
_MODEL_KEY = re.compile(r"^model(\d{0,4})$")
_LAYER = re.compile(r"^(?P<stack>decoder\.layers\.)(?P<layer>\d{1,6})(?P<rest>\..+)$")
_EXPERT = (
    re.compile(r"^(?P<stem>.*\.experts\.local_experts\.)(?P<expert>\d{1,6})(?P<rest>\..+)$"),  # one module for each
    re.compile(r"^(?P<stem>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<expert>\d{1,6})(?P<rest>)$"),  # grouped
)
# The name of an expert's weight in a model whose experts are grouped ends in the expert's number.
_LOCAL_EXPERT = re.compile(r"^(?P<stem>.*\.experts\.)local_experts\.(?P<expert>\d+)\.(?P<rest>.+)$")


class LegacyWeights(Weights):
    """The weights of one iteration, the directory of the ``mp_rank_*``, of a legacy ``torch`` checkpoint.

    Layers and experts have their numbers in the whole model, whichever rank held them. How tensor-parallel shards are
    joined follows from the model's table, which :meth:`named` gets. Without it, weights of one shard and those of the
    vocabulary are whole; of any other weight, ``tensors`` holds the first shard.

    Raises:
        CheckpointError: It is not a readable legacy checkpoint, or a rank's file is missing.
    """

    naming = "megatron"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = _rank_files(directory)
        states = {path: _RankState(directory, path) for path in paths.values()}
        self.files = {str(path): (directory / path).stat().st_size for path in paths.values()}
        self.arguments = states[next(iter(paths.values()))].arguments
        self.optimizer = [info for state in states.values() for info in state.optimizer]
        untied = self.arguments.get("untie_embeddings_and_output_weights")
        self.tied = None if untied is None else not untied
        last = states[paths[max(paths)]].chunks
        first_stage = any(VOCABULARY_WEIGHTS[1] in chunk for chunk in last)
        ranks, parallel = _by_rank(paths, self.arguments, first_stage, directory)
        self._shards = _assemble({rank: states[path].chunks for rank, path in ranks.items()}, parallel, directory)
        self._map: WeightMap | None = None
        self.tensors = {key: self._info(key) for key in self._shards}
        if any(len(shards) > 1 and name not in VOCABULARY_WEIGHTS for name, shards in self._shards.items()):
            self.notes = [
                "of each weight, the shard of the first tensor-parallel rank is shown: the model's shape is unknown"
            ]

    def named(self, weight_map: WeightMap) -> dict[str, TensorInfo]:
        """The weights by megatron-core's names, and all others by the names that they were saved under."""
        self._map, self.notes = weight_map, []
        found: dict[str, TensorInfo] = {}
        taken: set[str] = set()
        for name in weight_map.megatron_names():
            if (key := self._find(name)) is not None:
                taken |= {key, *(other for place in places(name) for other in place.keys)}  # a norm may have two names
                found[name] = self._info(name)
        return found | {key: self._info(key) for key in self.tensors if key not in taken}

    def tensor(self, name: str) -> LazyTensor:
        """One whole weight."""
        if (key := self._find(name)) is None:
            advice = "use the checkpoint and the config of one model"
            raise CheckpointError(f"{self.directory} has no weight {name}; {advice}")
        shards = self._shards[key]
        try:
            # Megatron's shards of a weight are all alike; joining others might give a wrong weight.
            if len({(shard.shape, shard.dtype) for shard in shards}) > 1:
                raise ValueError("shards of several shapes or types")
            return self._joined(key, shards)
        except ValueError as error:
            shown = ", ".join(f"{shard.shape} of {shard.dtype}" for shard in shards) + "; use another checkpoint"
            raise CheckpointError(f"the shards of {key} in {self.directory} do not fit together: {shown}") from error

    def _find(self, name: str) -> str | None:
        grouped = _LOCAL_EXPERT.sub(r"\g<stem>\g<rest>\g<expert>", name)
        tried = [StoredPlace((key,), None) for key in dict.fromkeys((name, grouped))]
        tried += [place for place in places(name) if not place.index]
        return next((place.keys[0] for place in tried if all(key in self._shards for key in place.keys)), None)

    def _joined(self, key: str, shards: Sequence[LazyTensor]) -> LazyTensor:
        if len(shards) == 1:
            return shards[0]
        if self._map is not None:
            with suppress(WeightError):  # not one of the model's weights
                return self._map.merge_tp(key, shards)
        if key in VOCABULARY_WEIGHTS:
            return concat(shards)
        raise CheckpointError(
            f"{self.directory} holds {key} in {len(shards)} shards, and nothing says how they are joined; "
            "give a Hugging Face directory with config.json as origin_hf_dir="
        )

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensor(name).info(name)
        except CheckpointError:  # raised again when it is read
            key = self._find(name)
            assert key is not None
            return self._shards[key][0].info(name)


class _RankState:
    """A rank's file: Megatron's arguments, a state dict per virtual pipeline stage, and optimizer state."""

    def __init__(self, directory: Path, name: Path) -> None:
        file = TorchFile(directory, str(name))
        content = file.content()
        content = content if isinstance(content, dict) else {}
        found = {int(match[1] or 0): content[key] for key in content if (match := _MODEL_KEY.match(str(key)))}
        if found and max(Counter(map(id, found.values())).values()) > _SHARING:
            # Each is laid out again, so a small file could ask for any amount of work.
            raise CheckpointError(f"{file.path} holds one state dict under several keys; use another checkpoint")
        if not found:
            raise CheckpointError(f"{file.path} holds no model (no key 'model' or 'model0'); use Megatron's checkpoint")
        version = content.get("checkpoint_version", _CHECKPOINT_VERSION)
        if version != _CHECKPOINT_VERSION:
            advice = f"allowed: {_CHECKPOINT_VERSION}; load it with Megatron and save it again"
            raise CheckpointError(f"{file.path} has checkpoint version {version}; {advice}")
        self.arguments = plain_arguments(content.get("args"))
        self.chunks = [_chunk(found[number], file) for number in sorted(found)]
        needed = sum(tensor.nbytes for chunk in self.chunks for tensor in chunk.values())
        if needed > _SHARING * (size := (directory / name).stat().st_size):
            what = f"has {size} bytes, and its weights would have {needed}: too many of them are the same"
            raise CheckpointError(f"{file.path} {what}; allowed: twice the file; use another checkpoint")
        self.optimizer = list(_optimizer_in(content, file, name.parent.name))


def _items(value: Any) -> Mapping[Any, Any] | None:
    """A dict, or the items of an ordered one."""
    if isinstance(value, dict):
        return value
    is_pairs = isinstance(value, Obj) and all(isinstance(item, tuple) and len(item) == 2 for item in value.items)
    return dict(value.items) if is_pairs and value.items else None


def _chunk(state: Any, file: TorchFile) -> _Chunk:
    """A state dict without wrappers' prefixes and Transformer Engine's extra state."""
    items = _items(state)
    if items is None:
        raise CheckpointError(f"{file.path} holds no state dict under 'model'; use a checkpoint of Megatron")
    tensors: dict[str, LazyTensor] = {}
    for key, value in items.items():
        if key == "language_model":
            advice = "allowed: a GPTModel of megatron-core; load it with Megatron and save it with --use-mcore-models"
            raise CheckpointError(f"{file.path} holds a model from before megatron-core (language_model.…); {advice}")
        if value is not None and not str(key).endswith("_extra_state"):
            name = re.sub(r"^(module\.)+", "", str(key))
            tensor = file.tensor(value, name)
            if tensor is None:
                raise CheckpointError(f"{file.path} holds {key}, which is not a plain tensor; use another checkpoint")
            tensors[name] = tensor
    return tensors


def _optimizer_in(content: Mapping[Any, Any], file: TorchFile, rank: str) -> Iterator[TensorInfo]:
    """The optimizer's tensors in a rank's file; a container that occurs twice is read once."""
    pending = [(f"{rank}.{key}", value) for key, value in content.items() if "optimizer" in str(key)]
    seen: set[int] = set()
    while pending:
        name, value = pending.pop()
        if id(value) in seen or len(name) > _MAX_NAME:
            continue
        seen.add(id(value))
        if (tensor := file.tensor(value, name)) is not None:
            yield tensor.info(name)
        elif (items := _items(value)) is not None:
            pending += [(f"{name}.{key}", item) for key, item in items.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}.{number}", item) for number, item in enumerate(value)]


def _assemble(states: Mapping[Rank, list[_Chunk]], parallel: Parallel, directory: Path) -> dict[str, list[LazyTensor]]:
    """Shards of every weight in tensor-parallel order, numbered in the whole model."""
    weights: dict[str, list[LazyTensor]] = {}
    first_layer = 0
    virtual = {len(chunks) for chunks in states.values()}
    if len(virtual) != 1:
        raise CheckpointError(f"the ranks of {directory} hold {sorted(virtual)} model chunks; use one run's checkpoint")
    # With virtual stages the model goes through every rank's first chunk, then through every rank's second.
    for virtual_stage in range(virtual.pop()):
        for stage in range(parallel.pipeline):
            ranks = {rank: states[rank][virtual_stage] for rank in sorted(states) if rank.pipeline == stage}
            layers = {int(match["layer"]) for chunk in ranks.values() for key in chunk if (match := _LAYER.match(key))}
            if layers != set(range(len(layers))):
                advice = "allowed: numbers from 0 in each stage; use another checkpoint"
                raise CheckpointError(f"stage {stage} of {directory} has layers {sorted(layers)}; {advice}")
            for name, shards in _stage_weights(ranks, parallel, directory):
                # Later stages repeat the embedding: as a tied output layer, or for multi-token prediction.
                weights.setdefault(_shifted(name, first_layer), shards)
            first_layer += len(layers)
    return weights


def _shifted(name: str, first_layer: int) -> str:
    return _LAYER.sub(lambda match: f"{match['stack']}{int(match['layer']) + first_layer}{match['rest']}", name)


def _stage_weights(
    ranks: Mapping[Rank, _Chunk], parallel: Parallel, directory: Path
) -> Iterator[tuple[str, list[LazyTensor]]]:
    """The weights of one stage: names with whole-model expert numbers, and shards in tensor-parallel order."""
    patterns = [(key, pattern) for key in next(iter(ranks.values())) for pattern in _EXPERT]
    experts = {key: match for key, pattern in patterns if (match := pattern.match(key))}
    count_local = Counter((match["stem"], match["rest"]) for match in experts.values())

    def holder(key: str, of: int, shard: int, expert: int | None = None) -> LazyTensor:
        """One of ``of`` shards. Consecutive tensor ranks hold them; further ones repeat them or hold other experts."""
        wanted = (rank for rank in ranks if rank.tensor % of == shard and expert in (None, rank.expert))
        rank = next(wanted, None)
        if rank is None or key not in ranks[rank]:
            what = f"shard {shard} of {of} of {key} ({rank or 'no rank has it'})"
            raise CheckpointError(f"{directory} lacks {what}; use a whole checkpoint")
        return ranks[rank][key]

    for key in dict.fromkeys(key for chunk in ranks.values() for key in chunk):
        match = experts.get(key)
        if match is None:
            yield key, [holder(key, parallel.tensor, shard) for shard in range(parallel.tensor)]
            continue
        for e in range(parallel.expert):
            number = e * count_local[match["stem"], match["rest"]] + int(match["expert"])
            shards = [holder(key, parallel.expert_tensor, shard, e) for shard in range(parallel.expert_tensor)]
            yield f"{match['stem']}{number}{match['rest']}", shards
