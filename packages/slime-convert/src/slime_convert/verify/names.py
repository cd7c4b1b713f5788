"""Two checkpoints under one set of names: Megatron's weights are cut into Hugging Face's where a shape is known."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_convert.bridge import bridged_weights
from slime_convert.checkpoint import VOCABULARY_WEIGHTS, Naming, TensorInfo, Weights, tensor_info
from slime_convert.errors import ConvertError, HfConfigError, WeightError
from slime_convert.mapping import WeightMap, WeightTranslation
from slime_convert.shape import FAMILIES, ModelShape

_EMBEDDINGS: Mapping[Naming, tuple[str, str]] = {
    "huggingface": ("lm_head.weight", "model.embed_tokens.weight"),
    "megatron": VOCABULARY_WEIGHTS,
}


class AsHf:
    """A checkpoint with Megatron's names, seen under Hugging Face's.

    One Megatron weight is held at a time, because several Hugging Face weights are cut from it. Weights that the
    model's table does not know keep their own names, so that none is passed over.

    Args:
        weights: With Megatron's names.
        weight_map: The model, unpadded.
    """

    naming: Naming = "huggingface"
    shape: ModelShape | None = None

    def __init__(self, weights: Weights, weight_map: WeightTranslation) -> None:
        self.directory = weights.directory
        self.arguments = weights.arguments
        self.storage = weights.storage
        self.expected = weight_map.megatron_args()
        self.tied: bool | None = not self.expected["untie_embeddings_and_output_weights"]
        self._weights = weights
        self._map = weight_map
        # The table of a tied model has no output layer; later pipeline stages may store it all the same.
        self._tied_output = VOCABULARY_WEIGHTS[0] if self.tied else None
        self._whole: dict[str, str] = {}
        self._held: tuple[str, dict[str, Tensor]] = ("", {})
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in weights.named(self._map).items():
            for part in self._parts(info):
                self.tensors[part.name] = part
                self._whole[part.name] = name

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The tensors: they have been renamed already."""
        return self.tensors

    def load(self, name: str) -> Tensor:
        """One Hugging Face weight.

        Raises:
            ConvertError: It cannot be read.
        """
        whole = self._whole[name]
        if whole == name:
            return self._weights.load(name)
        if whole == self._tied_output:
            return self._weights.load(whole)[: self._map.padded_vocab_size]
        if self._held[0] != whole:
            self._held = ("", {})  # two of them need not fit into memory
            self._held = (whole, dict(self._map.to_hf(whole, self._weights.load(whole))))
        return self._held[1][name]

    def _parts(self, info: TensorInfo) -> list[TensorInfo]:
        """What becomes of a weight, found out on a tensor without elements.

        One of another shape than the model's keeps its own, so that it differs from every weight that it stands for.
        """
        dtype = getattr(torch, info.dtype)
        if info.name == self._tied_output and info.shape:
            shape = (min(info.shape[0], self._map.padded_vocab_size), *info.shape[1:])
            return [tensor_info(_EMBEDDINGS["huggingface"][0], info.dtype, shape)]
        try:
            names = self._map.hf_parts(info.name)
        except WeightError:
            return [info]
        try:
            parts = self._map.to_hf(info.name, torch.empty(info.shape, dtype=dtype, device="meta"))
        except WeightError:
            return [dataclasses.replace(info, name=name) for name in names]
        return [TensorInfo(name, info.dtype, tuple(part.shape), part.nbytes) for name, part in parts]


class WithoutPadding:
    """A checkpoint with Megatron's names, its embedding and output layer cut to the vocabulary."""

    naming: Naming = "megatron"

    def __init__(self, weights: Weights, vocab_size: int) -> None:
        self.directory, self.arguments = weights.directory, weights.arguments
        self.tied, self.shape, self.storage = weights.tied, weights.shape, weights.storage
        self._weights, self._vocab_size = weights, vocab_size
        self.tensors = {name: self._cut(info) for name, info in weights.tensors.items()}

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The tensors: no table gives them other names."""
        return self.tensors

    def load(self, name: str) -> Tensor:
        """One weight, without padding.

        Raises:
            ConvertError: It cannot be read.
        """
        tensor = self._weights.load(name)
        return tensor[: self._vocab_size] if name in VOCABULARY_WEIGHTS and tensor.dim() else tensor

    def _cut(self, info: TensorInfo) -> TensorInfo:
        if info.name not in VOCABULARY_WEIGHTS or not info.shape or info.shape[0] <= self._vocab_size:
            return info
        shape = (self._vocab_size, *info.shape[1:])
        return dataclasses.replace(info, shape=shape, nbytes=info.nbytes // info.shape[0] * self._vocab_size)


def under_one_naming(
    left: Weights, right: Weights, origin: str | Path | None, bridge: str | None = None
) -> tuple[Weights, Weights]:
    """Two checkpoints under the same names.

    Args:
        left: One checkpoint.
        right: The other.
        origin: A Hugging Face directory whose ``config.json`` describes both; ``None`` to find the shape in them.
        bridge: ``mbridge`` to take the names from it instead of this package's tables.

    Raises:
        BridgeError: The bridge is unknown or not installed.
        HfConfigError: The names differ, and neither checkpoint tells the model's shape.
    """
    if left.naming == right.naming == "huggingface":
        return left, right
    if bridge is not None:
        weight_map = bridged_weights(bridge, origin or _described(left, right))
        return _as_hf(left, weight_map), _as_hf(right, weight_map)
    given = ModelShape.from_hf_config(origin) if origin is not None else left.shape or right.shape
    megatron = [side for side in (left, right) if side.naming == "megatron"]
    vocab_size = vocabulary_of(megatron)
    shape = given or next((found for side in megatron if (found := shape_from_arguments(side, vocab_size))), None)
    if shape is not None:
        weight_map = WeightMap(shape)
        return _as_hf(left, weight_map), _as_hf(right, weight_map)
    if left.naming != right.naming:
        origin = left.directory if left.naming == "huggingface" else right.directory
        if (origin / "config.json").is_file():
            ModelShape.from_hf_config(origin)  # says what it is in the config that is not supported
        raise HfConfigError(
            f"neither {left.directory} nor {right.directory} tells the model's shape, which is needed to compare "
            "Megatron's weights with Hugging Face's; give a Hugging Face directory with config.json as --origin-hf-dir"
        )
    if vocab_size < 1:
        return left, right
    return WithoutPadding(left, vocab_size), WithoutPadding(right, vocab_size)


def _as_hf(side: Weights, weight_map: WeightTranslation) -> Weights:
    return AsHf(side, weight_map) if side.naming == "megatron" else side


def _described(left: Weights, right: Weights) -> Path:
    """The side that has a ``config.json``."""
    for side in (left, right):
        if (side.directory / "config.json").is_file():
            return side.directory
    raise HfConfigError(
        f"neither {left.directory} nor {right.directory} has a config.json, which a bridge needs; "
        "give a Hugging Face directory with it as --origin-hf-dir"
    )


def vocabulary_of(sides: Sequence[Weights]) -> int:
    """Rows of the embedding that are no padding: the most that a side records, else the fewest that a side has."""
    recorded = [size for side in sides if isinstance(size := side.arguments.get("vocab_size"), int)]
    rows = [info.shape[0] for side in sides if (info := side.tensors.get(VOCABULARY_WEIGHTS[1])) and info.shape]
    return max(recorded) if recorded else min(rows, default=0)


def shape_from_arguments(weights: Weights, vocab_size: int) -> ModelShape | None:
    """The shape that a Megatron checkpoint's recorded arguments describe.

    Megatron's own do not name the family. It is then the one whose table accounts for every weight. Where several do,
    they must agree on Hugging Face's names.

    Args:
        weights: With Megatron's names.
        vocab_size: Rows of the embedding without padding.

    Returns:
        The shape, or ``None`` if arguments are missing, or no family fits, or several that disagree.
    """
    known = {field.name for field in dataclasses.fields(ModelShape)}
    values: dict[str, Any] = {
        name: value for name, value in weights.arguments.items() if name in known and value is not None
    }
    values["vocab_size"] = vocab_size
    fitting: dict[frozenset[str], ModelShape] = {}
    recorded = str(weights.arguments.get("hf_model_type"))
    for family in [recorded] if recorded in FAMILIES else FAMILIES:
        try:
            shape = ModelShape(**{**values, "family": family})
            weight_map = WeightMap(shape)
            if _accounts_for_all(weight_map, weights):
                fitting.setdefault(frozenset(weight_map.hf_names()), shape)
        except (ConvertError, TypeError, ValueError):
            continue
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def _accounts_for_all(weight_map: WeightMap, weights: Weights) -> bool:
    tied_output = VOCABULARY_WEIGHTS[0]
    names = set(weight_map.megatron_names())
    tensors = copy.copy(weights).named(weight_map)  # weights keep the table that they are named by
    if names - {tied_output} != set(tensors) - {tied_output}:
        return False
    for name, info in tensors.items():
        weight_map.to_hf(name, torch.empty(info.shape, device="meta"))
    return True


def shared_output(naming: Naming, left: Weights, right: Weights) -> tuple[str, str] | None:
    """An output layer that one side stores and the other takes from its embedding.

    A tied model may store its output layer or not; whichever it does, the model is the same.

    Returns:
        The names of output layer and embedding; ``None`` if both sides or neither store it, or a side is not tied.
    """
    output, embedding = _EMBEDDINGS[naming]
    if (output in left.tensors) == (output in right.tensors) or False in (left.tied, right.tied):
        return None
    lacking = right if output in left.tensors else left
    return (output, embedding) if embedding in lacking.tensors else None
