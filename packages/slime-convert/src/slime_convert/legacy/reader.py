"""Reading a legacy checkpoint weight by weight: the ranks' parts are merged when a weight is asked for."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_convert.errors import CheckpointError
from slime_convert.legacy.layout import Parallel, Rank, by_rank, rank_files
from slime_convert.torch_dist.layout import Place, places
from slime_convert.torch_file import StoredTensor, TorchFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Merge = Callable[[str, Sequence["Tensor"]], "Tensor"]
"""Makes a whole weight of its name and its tensor-parallel shards: :meth:`slime_convert.mapping.WeightMap.merge_tp`."""

_Chunk = Mapping[str, StoredTensor]
_CHECKPOINT_VERSION = 3.0
_MODEL_KEY = re.compile(r"^model(\d{0,4})$")
_LAYER = re.compile(r"^(?P<stack>decoder\.layers\.)(?P<layer>\d{1,6})(?P<rest>\..+)$")
_EXPERT = (
    re.compile(r"^(?P<stem>.*\.experts\.local_experts\.)(?P<expert>\d{1,6})(?P<rest>\..+)$"),  # one module for each
    re.compile(r"^(?P<stem>.*\.experts\.linear_fc[12]\.(?:weight|bias))(?P<expert>\d{1,6})(?P<rest>)$"),  # grouped
)
# The name of an expert's weight in a model whose experts are grouped ends in the expert's number.
_LOCAL_EXPERT = re.compile(r"^(?P<stem>.*\.experts\.)local_experts\.(?P<expert>\d+)\.(?P<rest>.+)$")
_EMBEDDING = "embedding.word_embeddings.weight"


class LegacyReader:
    """The weights of a legacy ``torch`` checkpoint; optimizer and random state stay unread.

    Nothing of Megatron is imported, and nothing but plain types is unpickled. Weights are read from disk one by one.
    Layers and experts have their numbers in the whole model, whichever rank held them.

    Args:
        directory: One iteration: the directory of the ``mp_rank_*``.
        merge: Makes a whole weight of its tensor-parallel shards.

    Raises:
        CheckpointError: It is no readable legacy checkpoint, or a rank's file is missing.
    """

    def __init__(self, directory: str | Path, merge: Merge) -> None:
        self.directory = Path(directory)
        self._merge = merge
        paths = rank_files(self.directory)
        states = {path: _state(path) for path in paths.values()}
        self._args = states[next(iter(paths.values()))][0]
        last = states[paths[max(paths)]][1]
        ranks, parallel = by_rank(paths, self._args, any(_EMBEDDING in chunk for chunk in last), self.directory)
        self._weights = _assemble({rank: states[path][1] for rank, path in ranks.items()}, parallel, self.directory)

    def merging(self, merge: Merge) -> LegacyReader:
        """The same checkpoint, its shards merged in another way."""
        other = copy.copy(self)
        other._merge = merge
        return other

    @property
    def shards(self) -> Mapping[str, Sequence[StoredTensor]]:
        """The model's tensors by :attr:`weight_keys`, not read yet: their shards in tensor-parallel order."""
        return self._weights

    @property
    def weight_keys(self) -> set[str]:
        """Names of the model's tensors, as the model that wrote them names them, but numbered in the whole model."""
        return set(self._weights)

    def args(self) -> Mapping[str, Any]:
        """The arguments that the checkpoint records, by Megatron's names; empty if it records none."""
        return self._args

    def find(self, name: str) -> Place:
        """Under which key a weight lies.

        Raises:
            CheckpointError: The checkpoint has no such weight.
        """
        grouped = _LOCAL_EXPERT.sub(r"\g<stem>\g<rest>\g<expert>", name)
        tried = [Place((key,), None) for key in dict.fromkeys((name, grouped))]
        tried += [place for place in places(name) if not place.index]
        for place in tried:
            if all(key in self._weights for key in place.keys):
                return place
        raise CheckpointError(
            f"{self.directory} has no weight {name} (looked for {', '.join('+'.join(place.keys) for place in tried)}); "
            "use the checkpoint and the config of one model"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of one weight, without reading it."""
        import torch

        key = self.find(name).keys[0]
        shards = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in self._weights[key]]
        return tuple(self._merged(key, shards).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight."""
        import torch

        dtype: torch.dtype = getattr(torch, self._weights[self.find(name).keys[0]][0].dtype)
        return dtype

    def load(self, name: str) -> Tensor:
        """One whole weight.

        Args:
            name: Of megatron-core's ``GPTModel`` with local layers, with the layer's number in the whole model.

        Raises:
            CheckpointError: The weight is missing or damaged, or its shards do not fit together.
        """
        key = self.find(name).keys[0]
        return self._merged(key, [shard.load() for shard in self._weights[key]])

    def _merged(self, key: str, shards: Sequence[Tensor]) -> Tensor:
        try:
            # Megatron's shards of a weight are all alike; others might still be joined, to something else.
            if len({(shard.shape, shard.dtype) for shard in shards}) > 1:
                raise ValueError("shards of several shapes or types")
            return self._merge(key, shards)
        except (RuntimeError, ValueError, IndexError) as error:  # torch's words for shapes that do not fit
            raise CheckpointError(
                f"the shards of {key} in {self.directory} do not fit together: "
                f"{', '.join(f'{tuple(shard.shape)} of {shard.dtype}' for shard in shards)}; use another checkpoint"
            ) from error


def _state(path: Path) -> tuple[Mapping[str, Any], list[_Chunk]]:
    """The arguments in a rank's file, and its part of the model: a chunk for each virtual pipeline stage."""
    content = TorchFile(path).content()
    found = (
        {int(match[1] or 0): value for key, value in content.items() if (match := _MODEL_KEY.match(str(key)))}
        if isinstance(content, dict)
        else {}
    )
    if not found:
        raise CheckpointError(f"{path} holds no model (no key 'model' or 'model0'); use a checkpoint of Megatron")
    version = content.get("checkpoint_version", _CHECKPOINT_VERSION)
    if version != _CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint version {version}; allowed: {_CHECKPOINT_VERSION}; "
            "load it with Megatron and save it again"
        )
    args = content.get("args")
    plain = args if isinstance(args, dict) else dict(getattr(args, "__dict__", {}))
    return plain, [_chunk(found[number], path) for number in sorted(found)]


def _chunk(state: Any, path: Path) -> _Chunk:
    """One model state dict without wrappers' prefixes and Transformer Engine's extra state."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state dict under 'model'; use a checkpoint of Megatron")
    tensors: dict[str, StoredTensor] = {}
    for key, value in state.items():
        if key == "language_model":
            raise CheckpointError(
                f"{path} holds a model from before megatron-core (language_model.…); allowed: a GPTModel of "
                "megatron-core; load it with Megatron and save it with --use-mcore-models"
            )
        if value is None or str(key).endswith("_extra_state"):
            continue
        if not isinstance(value, StoredTensor):
            raise CheckpointError(f"{path} holds {key}, which is no plain tensor; use another checkpoint")
        tensors[re.sub(r"^(module\.)+", "", str(key))] = value
    return tensors


def _assemble(
    states: Mapping[Rank, list[_Chunk]], parallel: Parallel, directory: Path
) -> dict[str, list[StoredTensor]]:
    """Shards of every weight in tensor-parallel order, numbered in the whole model."""
    weights: dict[str, list[StoredTensor]] = {}
    first_layer = 0
    virtual = {len(chunks) for chunks in states.values()}
    if len(virtual) != 1:
        raise CheckpointError(
            f"the ranks of {directory} hold {sorted(virtual)} model chunks; use a checkpoint of one run"
        )
    ordered = sorted(states.items(), key=lambda item: item[0])
    # With virtual stages the model goes through every rank's first chunk, then through every rank's second.
    for virtual_stage in range(virtual.pop()):
        for stage in range(parallel.pipeline):
            ranks = {rank: chunks[virtual_stage] for rank, chunks in ordered if rank.pipeline == stage}
            layers = _layer_numbers(ranks)
            if layers != set(range(len(layers))):
                raise CheckpointError(
                    f"stage {stage} of {directory} has layers {sorted(layers)}; a legacy checkpoint numbers them "
                    "from 0 in each stage; use another checkpoint"
                )
            for name, shards in _stage_weights(ranks, parallel, directory):
                # Later stages repeat the embedding: as a tied output layer, or for multi-token prediction.
                weights.setdefault(_shifted(name, first_layer), shards)
            first_layer += len(layers)
    return weights


def _layer_numbers(ranks: Mapping[Rank, _Chunk]) -> set[int]:
    return {int(match["layer"]) for chunk in ranks.values() for key in chunk if (match := _LAYER.match(key))}


def _shifted(name: str, first_layer: int) -> str:
    return _LAYER.sub(lambda match: f"{match['stack']}{int(match['layer']) + first_layer}{match['rest']}", name)


def _stage_weights(
    ranks: Mapping[Rank, _Chunk], parallel: Parallel, directory: Path
) -> Iterator[tuple[str, list[StoredTensor]]]:
    """The weights of one stage: names with whole-model expert numbers, and shards in tensor-parallel order."""
    experts = {key: match for key in next(iter(ranks.values())) if (match := _expert(key))}
    count_local = Counter((match["stem"], match["rest"]) for match in experts.values())

    def holder(key: str, of: int, shard: int, expert: int | None = None) -> StoredTensor:
        """One of ``of`` shards. Consecutive tensor ranks hold them; further ones repeat them or hold other experts."""
        wanted = (rank for rank in ranks if rank.tensor % of == shard and expert in (None, rank.expert))
        rank = next(wanted, None)
        if rank is None or key not in ranks[rank]:
            raise CheckpointError(
                f"{directory} lacks shard {shard} of {of} of {key} ({rank or 'no rank has it'}); use a whole checkpoint"
            )
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


def _expert(key: str) -> re.Match[str] | None:
    return next((match for pattern in _EXPERT if (match := pattern.match(key))), None)
