"""Two checkpoints under one set of names: Megatron's weights are cut into Hugging Face's where a shape is known."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slime_convert.errors import ConvertError, HfConfigError, WeightError
from slime_convert.families import FAMILIES
from slime_convert.files.tensors import LazyTensor, TensorInfo, narrow, tensor_info
from slime_convert.formats.checkpoint import VOCABULARY_WEIGHTS, Naming, Weights
from slime_convert.mapping import WeightMap, check_weight_count, hf_copies, without_missing_modules
from slime_convert.shape import ModelShape

_EMBEDDINGS: Mapping[Naming, tuple[str, str]] = {
    "huggingface": ("lm_head.weight", "model.embed_tokens.weight"),
    "megatron": VOCABULARY_WEIGHTS,
}


class View(Weights):
    """A checkpoint whose weights are seen under other names, or in part."""

    def __init__(self, weights: Weights, naming: Naming) -> None:
        self.weights, self.naming = weights, naming
        self.directory, self.arguments, self.storage = weights.directory, weights.arguments, weights.storage
        self.tied, self.shape = weights.tied, weights.shape
        self.files, self.optimizer, self.notes = weights.files, weights.optimizer, weights.notes


class AsHf(View):
    """A checkpoint with Megatron's names, seen under Hugging Face's. Weights that the table lacks keep their names."""

    def __init__(self, weights: Weights, weight_map: WeightMap) -> None:
        super().__init__(weights, "huggingface")
        self.map = weight_map
        self.tied = not weight_map.shape.untie_embeddings_and_output_weights
        self._found = dict(weights.named(weight_map))
        self.notes = weights.notes  # naming the weights may have settled some
        # The table of a tied model has no output layer; later pipeline stages may store it all the same.
        self._tied_output = self._found.pop(VOCABULARY_WEIGHTS[0], None) if self.tied else None
        self._cut: set[str] = set()
        self.tensors = dict(self._infos())

    def _infos(self) -> list[tuple[str, TensorInfo]]:
        infos, used = [], set()
        for name in self.map.hf_names():
            parts = self.map.megatron_parts(name)
            if not all(part in self._found for part in parts):
                continue
            used |= set(parts)
            try:
                outline = self.map.huggingface(name, partial(_outline, self._found))
                self._cut.add(name)
                infos.append((name, outline.info(name)))
            except WeightError:
                # One of another shape than the model's keeps it, and so will differ from the other side's.
                infos.append((name, self._found[parts[0]]._replace(name=name)))
        infos += [(name, info) for name, info in self._found.items() if name not in used]
        if self._tied_output is not None and self._tied_output.shape:
            rows = min(self._tied_output.shape[0], self.map.padded_vocab_size)
            shape = (rows, *self._tied_output.shape[1:])
            output = _EMBEDDINGS["huggingface"][0]
            infos.append((output, tensor_info(output, self._tied_output.dtype, shape)))
        return infos

    def tensor(self, name: str) -> LazyTensor:
        """One Hugging Face weight, to be read."""
        if name in self._cut:
            return self.map.huggingface(name, self.weights.tensor)
        if name == _EMBEDDINGS["huggingface"][0] and self._tied_output is not None:
            whole = self.weights.tensor(VOCABULARY_WEIGHTS[0])
            return narrow(whole, 0, 0, self.tensors[name].shape[0])
        return self.weights.tensor(name)


class WithoutPadding(View):
    """A checkpoint with Megatron's names, its embedding and output layer cut to the vocabulary."""

    def __init__(self, weights: Weights, vocab_size: int) -> None:
        super().__init__(weights, "megatron")
        self.tensors = {name: _cut(info, vocab_size) for name, info in weights.tensors.items()}

    def tensor(self, name: str) -> LazyTensor:
        """One weight, without padding."""
        whole, wanted = self.weights.tensor(name), self.tensors[name].shape
        return whole if whole.shape == wanted else narrow(whole, 0, 0, wanted[0])


def _cut(info: TensorInfo, vocab_size: int) -> TensorInfo:
    if info.name not in VOCABULARY_WEIGHTS or not info.shape or info.shape[0] <= vocab_size:
        return info
    return tensor_info(info.name, info.dtype, (vocab_size, *info.shape[1:]))


def under_one_naming(left: Weights, right: Weights, origin: str | Path | None) -> tuple[Weights, Weights]:
    """Two checkpoints under the same names; a :class:`HfConfigError` if these differ, and nothing tells the shape."""
    if left.naming == right.naming == "huggingface":
        return left, right
    given = ModelShape.from_hf_config(origin) if origin is not None else left.shape or right.shape
    megatron = [side for side in (left, right) if side.naming == "megatron"]
    vocab_size = vocabulary_of(megatron)
    shape = given or next((found for side in megatron if (found := shape_from_arguments(side, vocab_size))), None)
    if shape is not None:
        for side in megatron:
            check_weight_count(shape, side.tensors, side.directory)
        held = {name for side in (left, right) for name in side.tensors}
        weight_map = WeightMap(without_missing_modules(shape, held, left.directory)[0])
        left, right = (AsHf(side, weight_map) if side.naming == "megatron" else side for side in (left, right))
        return left, right
    if left.naming != right.naming:
        directory = left.directory if left.naming == "huggingface" else right.directory
        if (directory / "config.json").is_file():
            ModelShape.from_hf_config(directory)  # an error that says what is not supported in the config
        raise HfConfigError(
            f"neither {left.directory} nor {right.directory} tells the model's shape, which is needed to compare "
            "Megatron's weights with Hugging Face's; give a Hugging Face directory with config.json as origin_hf_dir="
        )
    if vocab_size < 1:
        return left, right
    return WithoutPadding(left, vocab_size), WithoutPadding(right, vocab_size)


def vocabulary_of(sides: Sequence[Weights]) -> int:
    """Rows of the embedding that are not padding: the most that a side records, else the fewest that a side has."""
    recorded = [size for side in sides if isinstance(size := side.arguments.get("vocab_size"), int)]
    rows = [info.shape[0] for side in sides if (info := side.tensors.get(VOCABULARY_WEIGHTS[1])) and info.shape]
    return max(recorded) if recorded else min(rows, default=0)


def shape_from_arguments(weights: Weights, vocab_size: int) -> ModelShape | None:
    """The shape that a Megatron checkpoint's recorded arguments describe; ``vocab_size`` is without padding.

    Megatron's own arguments do not name the family. It is then the one whose table accounts for every weight; where
    several do, they must agree on Hugging Face's names. ``None`` if arguments are missing, or there is no such family.
    """
    known = {field.name for field in dataclasses.fields(ModelShape)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in weights.arguments.items()
        if name in known and value is not None
    }
    values["vocab_size"] = vocab_size
    fitting: dict[frozenset[str], ModelShape] = {}
    recorded = str(weights.arguments.get("hf_model_type"))
    for family in [recorded] if recorded in FAMILIES else FAMILIES:
        try:
            shape = ModelShape(**values | {"family": family})
            check_weight_count(shape, weights.tensors, weights.directory)
            weight_map = WeightMap(shape)
            if _accounts_for_all(weight_map, weights):
                fitting.setdefault(frozenset(weight_map.hf_names()), shape)
        except (ConvertError, TypeError, ValueError):
            continue
    return next(iter(fitting.values())) if len(fitting) == 1 else None


def _accounts_for_all(weight_map: WeightMap, weights: Weights) -> bool:
    tied_output = VOCABULARY_WEIGHTS[0]
    names = set(weight_map.megatron_names())
    tensors = copy.copy(weights).named(weight_map)  # a copy, since weights keep the table that they are named by
    if names - {tied_output} != set(tensors) - {tied_output}:
        return False
    for name in weight_map.hf_names():
        weight_map.huggingface(name, partial(_outline, tensors))
    return True


def _outline(infos: Mapping[str, TensorInfo], name: str) -> LazyTensor:
    return LazyTensor.zeros(infos[name].dtype, infos[name].shape)


def shared_weights(naming: Naming, left: Weights, right: Weights) -> dict[str, str]:
    """Weights that only one side stores, with the name of the weight that they repeat.

    A tied model may store its output layer or not, and a prediction module its copies of embedding and output layer.
    """
    output, embedding = _EMBEDDINGS[naming]
    copies = {} if False in (left.tied, right.tied) else {output: embedding}
    shapes = [side.map.shape if isinstance(side, AsHf) else side.shape for side in (left, right)]
    if naming == "huggingface" and (shape := next(filter(None, shapes), None)) is not None and shape.mtp_num_layers:
        copies |= hf_copies(shape)
    return {
        copy: original
        for copy, original in copies.items()
        if (copy in left.tensors) != (copy in right.tensors)
        and original in (right if copy in left.tensors else left).tensors
    }
