"""`WeightMap`: one model's weights, translated between Megatron and Hugging Face. Pure: no file, no cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_convert.errors import WeightError
from slime_convert.mapping import tensor_parallel
from slime_convert.mapping.families import MTP_RULES, TABLES, HfWeight, Rule, in_mtp, named_sizes
from slime_convert.shape import ModelShape


@dataclass(frozen=True)
class _Weight:
    """A row of the table for one layer and, if it is about experts, one expert.

    The layer inside prediction module m has the number of layers plus m.
    """

    rule: Rule
    layer: int
    expert: int = 0
    module: int = 0

    def fill(self, template: str) -> str:
        """A name with this layer and expert."""
        numbers = {"{i}": self.layer, "{e}": self.expert, "{m}": self.module}
        for placeholder, number in numbers.items():
            template = template.replace(placeholder, str(number))
        return template


class WeightMap:
    """The weights of a model of a given shape, under both names.

    Megatron's names are those of megatron-core's ``GPTModel`` with local layers, such as
    ``decoder.layers.3.self_attention.linear_qkv.weight``, with the layer's number in the whole model (under pipeline
    parallelism, add the stage's offset first). The names that Transformer Engine gives to fused norms
    (``…linear_qkv.layer_norm_weight``, ``…linear_fc1.layer_norm_weight``) and to grouped experts
    (``…experts.linear_fc1.weight3``) are understood too. Experts have their number in the whole model.

    Args:
        shape: The model.
        padded_vocab_size: Rows of the embedding and the output layer in Megatron; by default no padding.

    Raises:
        WeightError: ``padded_vocab_size`` is less than the vocabulary.
    """

    def __init__(self, shape: ModelShape, padded_vocab_size: int | None = None) -> None:
        self.shape = shape
        self.padded_vocab_size = shape.vocab_size if padded_vocab_size is None else padded_vocab_size
        if self.padded_vocab_size < shape.vocab_size:
            raise WeightError(
                f"padded_vocab_size {padded_vocab_size} must be at least the vocabulary size {shape.vocab_size}"
            )
        self._sizes = named_sizes(shape, self.padded_vocab_size)
        self._weights = {weight.fill(weight.rule.megatron): weight for weight in _weights(shape)}
        self._by_name = self._weights | {
            weight.fill(weight.rule.engine_name): weight for weight in self._weights.values() if weight.rule.engine_name
        }

    @property
    def family(self) -> str:
        """Hugging Face ``model_type``."""
        return self.shape.family

    @property
    def equal_layers(self) -> bool:
        """Whether all layers have the same weights."""
        return not self.shape.num_dense_layers

    def megatron_args(self) -> Mapping[str, Any]:
        """The arguments that a Megatron checkpoint of this model records, as plain values."""
        return self.shape.to_megatron_args()

    def megatron_names(self) -> Iterator[str]:
        """Every Megatron weight of the model, in the model's order. A tied output layer is none."""
        return iter(self._weights)

    def hf_names(self) -> Iterator[str]:
        """Every Hugging Face weight of the model, in the model's order."""
        for weight in self._weights.values():
            for part in weight.rule.hf:
                yield weight.fill(part.name)
            yield from self._copies_of(weight)

    def hf_copies(self) -> dict[str, str]:
        """Hugging Face weights that are copies of another, by name: prediction modules have the embedding's and the
        output layer's."""
        return {
            copy: weight.fill(weight.rule.hf[0].name)
            for weight in self._weights.values()
            for copy in self._copies_of(weight)
        }

    def _copies_of(self, weight: _Weight) -> list[str]:
        template, shape = weight.rule.copied_to, self.shape
        layers = range(shape.num_layers, shape.num_layers + shape.mtp_num_layers)
        return [template.replace("{i}", str(layer)) for layer in layers] if template else []

    def hf_parts(self, name: str) -> list[str]:
        """The Hugging Face weights that one Megatron weight is made of."""
        weight = self._find(name)
        return [weight.fill(part.name) for part in weight.rule.hf]

    def engine_name(self, name: str) -> str:
        """The name of a Megatron weight in a model of Transformer Engine's layers."""
        weight = self._find(name)
        return weight.fill(weight.rule.engine_name or weight.rule.megatron)

    def expert(self, name: str) -> int | None:
        """The number of the expert that a Megatron weight belongs to, if it does."""
        weight = self._find(name)
        return weight.expert if "{e}" in weight.rule.megatron else None

    def stored_as(self, name: str) -> list[str]:
        """The names, one or two, under which ``torch_dist`` checkpoints hold a Megatron weight.

        Layers are numbered here even where they are stacked on disk; the experts of a layer share a name.
        """
        rule = (weight := self._find(name)).rule
        return [weight.fill(template) for template in rule.stored_as or (rule.engine_name or rule.megatron,)]

    def megatron_shape(self, name: str) -> tuple[int, ...]:
        """The whole (not tensor-parallel) shape of a Megatron weight, with the vocabulary's padding."""
        return self._lengths(self._find(name).rule.dims)

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The Hugging Face weights inside a Megatron weight.

        Args:
            name: Megatron's name. ``output_layer.weight`` of a tied model yields nothing.
            tensor: The whole weight; embedding and output layer may have any padding.

        Returns:
            Names and tensors, which may be views of ``tensor``.

        Raises:
            WeightError: Unknown name, or a shape other than the config's.
        """
        if name == "output_layer.weight" and not self.shape.untie_embeddings_and_output_weights:
            return []
        weight = self._find(name)
        tensor = self._trim(name, weight.rule, tensor)
        parts = weight.rule.layout.cut(tensor, self.shape)
        copies = [(copy, tensor) for copy in self._copies_of(weight)]
        return [*zip(self.hf_parts(name), parts, strict=True), *copies]

    def from_hf(self, name: str, load: Callable[[str], Tensor]) -> Tensor:
        """A Megatron weight, whole, from its Hugging Face weights.

        Args:
            name: Megatron's name.
            load: Gives the Hugging Face weight of a name.

        Returns:
            The weight of shape :meth:`megatron_shape`; padded vocabulary rows are zero. It may share memory with what
            ``load`` returned.

        Raises:
            WeightError: Unknown name, or a Hugging Face weight of another shape than the config says.
        """
        weight = self._find(name)
        parts = [self._checked_part(part, weight.fill(part.name), load) for part in weight.rule.hf]
        whole = weight.rule.layout.join(parts, self.shape)
        missing = self.megatron_shape(name)[0] - whole.shape[0]
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole

    def split_tp(self, name: str, tensor: Tensor, tp: int) -> list[Tensor]:
        """The shards of a Megatron weight for each of ``tp`` tensor-parallel ranks.

        Raises:
            WeightError: Unknown name, or the weight does not divide over ``tp`` ranks.
        """
        rule = self._find(name).rule
        # Attention divides only in whole query groups or heads, and the MLP's pair in each half.
        heads = dict.fromkeys(("latent_query", "latent_key_value", "latent_value"), self.shape.num_attention_heads)
        groups = dict.fromkeys(("qkv", "query"), self.shape.num_query_groups)
        pairs = dict.fromkeys(("gate_up", "expert_gate_up", "shared_gate_up"), tensor.shape[0] // 2)
        units = heads | groups | pairs
        dims = rule.dims.split()
        if rule.split is not tensor_parallel.TensorParallel.REPLICATED:
            axis = 1 if rule.split is tensor_parallel.TensorParallel.COLUMNS else 0
            length = units.get(dims[axis], tensor.shape[axis])
            if length % tp:
                raise WeightError(
                    f"{name} of shape {tuple(tensor.shape)} has {length} units to split, which do not divide over "
                    f"{tp} tensor-parallel ranks; use a divisor of {length}"
                )
        return tensor_parallel.split(tensor, rule.split, tp)

    def merge_tp(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """A whole Megatron weight from its tensor-parallel shards in rank order.

        Raises:
            WeightError: Unknown name.
        """
        rule = self._find(name).rule
        rows, all_rows = shards[0].shape[:1], self._lengths(rule.dims)[:1]
        # Local layers split the projections to the latents, which Transformer Engine's keep whole on every rank.
        in_parts = rule.split is tensor_parallel.TensorParallel.REPLICATED and rows != all_rows
        return tensor_parallel.merge(shards, tensor_parallel.TensorParallel.ROWS if in_parts else rule.split)

    def _find(self, name: str) -> _Weight:
        try:
            return self._by_name[name]
        except KeyError:
            raise WeightError(
                f"{name!r} is no weight of a {self.shape.family} model with {self.shape.num_layers} layers; "
                f"weights look like {list(self._weights)[1]!r}; use whole-model layer numbers and no wrapper's prefix"
            ) from None

    def _lengths(self, dims: str) -> tuple[int, ...]:
        return tuple(self._sizes[dim] for dim in dims.split())

    def _trim(self, name: str, rule: Rule, tensor: Tensor) -> Tensor:
        """``tensor`` without vocabulary padding, its shape checked."""
        expected = self._lengths(rule.dims.replace("padded_vocab", "vocab"))
        if rule.dims.startswith("padded_vocab") and tensor.dim() == 2 and tensor.shape[0] > expected[0]:
            tensor = tensor[: expected[0]]
        if tuple(tensor.shape) != expected:
            raise WeightError(f"{name} has shape {tuple(tensor.shape)}, but the model's config says {expected}")
        return tensor

    def _checked_part(self, part: HfWeight, name: str, load: Callable[[str], Tensor]) -> Tensor:
        tensor, expected = load(name), self._lengths(part.dims)
        if tuple(tensor.shape) != expected:
            raise WeightError(f"{name} has shape {tuple(tensor.shape)}, but the model's config says {expected}")
        return tensor


def _weights(shape: ModelShape) -> Iterator[_Weight]:
    """The table's rows for each layer, in the model's order: rows of a layer stand together."""
    rules = [rule for rule in TABLES[shape.family] if rule.when(shape)]
    in_layers = [rule for rule in rules if "{i}" in rule.megatron]
    first = rules.index(in_layers[0])
    yield from (_Weight(rule, 0) for rule in rules[:first])
    for layer in range(shape.num_layers):
        yield from _layer_weights(shape, in_layers, layer)
    for module in range(shape.mtp_num_layers):
        layer = shape.num_layers + module
        yield from (_Weight(rule, layer, module=module) for rule in MTP_RULES)
        yield from _layer_weights(shape, [in_mtp(rule) for rule in in_layers], layer, module)
    yield from (_Weight(rule, 0) for rule in rules[first + len(in_layers) :])


def _layer_weights(shape: ModelShape, rules: Sequence[Rule], layer: int, module: int = 0) -> Iterator[_Weight]:
    for rule in rules:
        if rule.in_layer(shape, layer):
            experts = shape.num_experts if "{e}" in rule.megatron else 1
            yield from (_Weight(rule, layer, expert, module) for expert in range(experts or 0))
