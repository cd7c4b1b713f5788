"""The weights of a legacy ``torch`` checkpoint, as :class:`slime_convert.checkpoint.Weights` asks for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime_convert.checkpoint import VOCABULARY_WEIGHTS, Naming, TensorInfo, tensor_info
from slime_convert.errors import CheckpointError, WeightError
from slime_convert.legacy import LegacyReader
from slime_convert.mapping import WeightTranslation
from slime_convert.torch_dist.headers import plain_arguments
from slime_convert.torch_dist.layout import places


class LegacyWeights:
    """The weights of a legacy ``torch`` checkpoint, numbered in the whole model.

    How tensor-parallel shards are joined is told by the model's table, once :meth:`named` has got it. Without it,
    weights of one shard and those of the vocabulary are whole; of any other, the first shard stands in ``tensors``.

    Args:
        iteration: The directory of the ``mp_rank_*``.

    Raises:
        CheckpointError: It is no readable legacy checkpoint, or a rank's file is missing.
    """

    naming: Naming = "megatron"
    shape = None
    storage = None

    def __init__(self, iteration: Path) -> None:
        self.directory = iteration
        self._reader = LegacyReader(iteration, functools.partial(_join, None))
        self.arguments = plain_arguments(self._reader.args())
        untied = self.arguments.get("untie_embeddings_and_output_weights")
        self.tied = None if untied is None else not untied
        self.tensors: Mapping[str, TensorInfo] = {key: self._info(key) for key in self._reader.shards}

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The weights by megatron-core's names, and what none of them is by the name that it was saved under."""
        self._reader = self._reader.merging(functools.partial(_join, weight_map))
        found: dict[str, TensorInfo] = {}
        taken: set[str] = set()
        for name in weight_map.megatron_names():
            try:
                taken |= set(self._reader.find(name).keys)
            except CheckpointError:
                continue
            taken |= {key for place in places(name) for key in place.keys}  # a norm may be saved under two names
            found[name] = self._info(name)
        return found | {key: self._info(key) for key in self.tensors if key not in taken}

    def load(self, name: str) -> Tensor:
        """One whole weight.

        Raises:
            CheckpointError: It is missing or damaged, or its shards cannot be joined.
        """
        return self._reader.load(name)

    def _info(self, name: str) -> TensorInfo:
        first = self._reader.shards[self._reader.find(name).keys[0]][0]
        try:
            return tensor_info(name, first.dtype, self._reader.shape(name))
        except CheckpointError:  # told when it is to be loaded
            return tensor_info(name, first.dtype, first.shape)


def _join(weight_map: WeightTranslation | None, name: str, shards: Sequence[Tensor]) -> Tensor:
    """A whole weight of its tensor-parallel shards."""
    if len(shards) == 1:
        return shards[0]
    if weight_map is not None:
        try:
            return weight_map.merge_tp(name, shards)
        except WeightError:
            pass  # none of the model's weights
    if name in VOCABULARY_WEIGHTS:
        return torch.cat(list(shards))
    raise CheckpointError(
        f"the checkpoint holds {name} in {len(shards)} shards, and nothing tells how they are joined; "
        "give a Hugging Face directory with config.json as --origin-hf-dir"
    )
