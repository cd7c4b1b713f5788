"""The weights of a ``torch_dist`` checkpoint, as :class:`slime_convert.checkpoint.Weights` asks for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from slime_convert.checkpoint import Naming, TensorInfo, tensor_info
from slime_convert.mapping import WeightTranslation
from slime_convert.torch_dist.headers import read_headers
from slime_convert.torch_dist.layout import Place, is_optimizer, layers_under, places
from slime_convert.torch_dist.reader import TorchDistReader


class TorchDistWeights:
    """The weights of a ``torch_dist`` checkpoint, stacks of layers taken apart.

    Args:
        iteration: One iteration of it.

    Raises:
        CheckpointError: It is no readable ``torch_dist`` checkpoint.
    """

    naming: Naming = "megatron"
    shape = None
    storage = None

    def __init__(self, iteration: Path) -> None:
        self.directory = iteration
        headers = read_headers(self.directory)
        self.arguments = headers.arguments
        untied = self.arguments.get("untie_embeddings_and_output_weights")
        self.tied = None if untied is None else not untied
        self._stored = {key: info for key, info in headers.tensors.items() if not is_optimizer(key)}
        self.tensors = self._layers_of(self._stored)
        self._reader = TorchDistReader(self.directory)

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The weights by megatron-core's names, and what none of them takes by its key and layer."""
        found: dict[str, TensorInfo] = {}
        taken: set[tuple[str, tuple[int, ...]]] = set()
        for name in weight_map.megatron_names():
            held = [place for place in places(name) if self._holds(place)]
            # One weight may be stored under several keys, for several kinds of model.
            taken |= {(key, place.index) for place in held for key in place.keys}
            if held:
                found[name] = self._info(name, held[0])
        return found | self._left_over(taken)

    def load(self, name: str) -> Tensor:
        """One whole weight.

        Raises:
            CheckpointError: It cannot be read.
        """
        return self._reader.load(name)

    def _holds(self, place: Place) -> bool:
        if not all(key in self._stored for key in place.keys):
            return False
        shapes = [self._stored[key].shape for key in place.keys]
        return all(
            len(shape) >= len(place.index)
            and all(number < length for number, length in zip(place.index, shape, strict=False))
            for shape in shapes
        )

    def _info(self, name: str, place: Place) -> TensorInfo:
        infos = [self._stored[key] for key in place.keys]
        shape = infos[0].shape[len(place.index) :]
        if len(infos) > 1:
            shape = (sum(info.shape[0] for info in infos), *shape[1:])
        return tensor_info(name, infos[0].dtype, shape)

    def _left_over(self, taken: set[tuple[str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
        axes = {key: len(index) for key, index in taken}
        left = self._layers_of({key: info for key, info in self._stored.items() if key not in axes})
        for key, number in Counter(key for key, _ in taken).items():
            if number < math.prod(self._stored[key].shape[: axes[key]]):
                # More layers than the model has: told as a whole.
                left[key] = self._stored[key]
        return left

    @staticmethod
    def _layers_of(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        return {
            name: tensor_info(name, info.dtype, shape)
            for key, info in stored.items()
            for name, shape in layers_under(key, info.shape)
        }
