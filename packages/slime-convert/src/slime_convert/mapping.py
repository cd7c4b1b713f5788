"""`WeightMap`: one model's weights, translated between Megatron and Hugging Face. Pure: no file, no cache.

It works on torch's tensors and on lazy ones (:mod:`slime_convert.files.tensors`) alike.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_convert.errors import WeightError
from slime_convert.families import FAMILIES
from slime_convert.families.family import EMBEDDING, OUTPUT, ROWS, WHOLE, HfPart, WeightRule, in_module
from slime_convert.families.layouts import LESS_ONE, AnyTensor, concat, plus_one, split
from slime_convert.files.reading import are_equal, read_whole
from slime_convert.files.tensors import LazyTensor, TensorInfo
from slime_convert.shape import ModelShape


@dataclass(frozen=True)
class _Weight:
    """A row of the table for one layer (in prediction module m, the number of layers plus m) and one expert, if any."""

    rule: WeightRule
    layer: int
    expert: int = 0
    module: int = 0

    def fill(self, template: str) -> str:
        return template.format(i=self.layer, e=self.expert, m=self.module)


@functools.lru_cache(maxsize=8)
def weight_map(shape: ModelShape, padded_vocab_size: int | None = None, *, one_expert: bool = False) -> WeightMap:
    """A map that all who ask for it share: of hundreds of experts it takes a second to make."""
    return WeightMap(shape, padded_vocab_size, one_expert=one_expert)


class WeightMap:
    """The weights of a model of a given shape, under both names.

    Megatron's names are those of megatron-core's ``GPTModel`` with local layers, such as
    ``decoder.layers.3.self_attention.linear_qkv.weight``, with the layer's number in the whole model (under pipeline
    parallelism, add the stage's offset first). The names that Transformer Engine gives to fused norms
    (``…linear_qkv.layer_norm_weight``, ``…linear_fc1.layer_norm_weight``) and to grouped experts
    (``…experts.linear_fc1.weight3``) are understood too. Experts have their number in the whole model.

    ``padded_vocab_size`` is the number of rows of the embedding and the output layer in Megatron; by default, and at
    least (:class:`WeightError`), that of the vocabulary.

    With ``one_expert`` the first expert of each layer stands for all of them, for what only counts: see :meth:`count`.
    """

    def __init__(self, shape: ModelShape, padded_vocab_size: int | None = None, *, one_expert: bool = False) -> None:
        self.shape = shape
        self._stands_for = (shape.num_experts or 1) if one_expert else 1
        self.padded_vocab_size = shape.vocab_size if padded_vocab_size is None else padded_vocab_size
        if self.padded_vocab_size < shape.vocab_size:
            allowed = f"at least the vocabulary size {shape.vocab_size}"
            raise WeightError(f"padded_vocab_size {padded_vocab_size} must be {allowed}")
        self._sizes = _named_sizes(shape, self.padded_vocab_size)
        self._known_lengths: dict[str, tuple[int, ...]] = {}
        rows = _weights(shape, 1 if one_expert else None)
        self._weights = {weight.fill(weight.rule.megatron): weight for weight in rows}
        self._by_name = self._weights | {
            weight.fill(weight.rule.te_name): weight for weight in self._weights.values() if weight.rule.te_name
        }
        self._hf: dict[str, list[tuple[str, int]]] = {}
        for name, weight in self._weights.items():
            for number, part in enumerate(weight.rule.hf):
                self._hf.setdefault(weight.fill(part.name), []).append((name, number))

    def megatron_names(self) -> Iterator[str]:
        """Every Megatron weight of the model, in the model's order; without the output layer of a tied model."""
        return iter(self._weights)

    def hf_names(self) -> Iterator[str]:
        """Every Hugging Face weight of the model but copies, in the model's order."""
        return iter(self._hf)

    def count(self, name: str) -> int:
        """The number of Megatron weights that a name stands for."""
        return self._stands_for if "{e}" in self._find(name).rule.megatron else 1

    def hf_count(self) -> int:
        """The number of Hugging Face weights but copies."""
        return sum(self._stands_for if "{e}" in self._part(hf).name else 1 for hf in self._hf)

    def module_names(self) -> list[str]:
        """Hugging Face weights of the prediction modules, without copies."""
        return [hf for hf, ((name, _), *_) in self._hf.items() if name.startswith("mtp.")]

    def hf_parts(self, name: str) -> list[str]:
        """The Hugging Face weights that one Megatron weight is made of."""
        weight = self._find(name)
        return [weight.fill(part.name) for part in weight.rule.hf]

    def of_one_type(self, name: str) -> list[str]:
        """The Hugging Face weights that must have one type for a Megatron weight to come back as it was."""
        weight = self._find(name)
        return self.hf_parts(name) + (self.hf_parts(weight.fill(weight.rule.like)) if weight.rule.like else [])

    def megatron_parts(self, hf_name: str) -> list[str]:
        """The Megatron weights that one Hugging Face weight lies in: several if it holds all experts of a layer."""
        return [name for name, _ in self._hf[hf_name]]

    def te_name(self, name: str) -> str:
        """The name of a Megatron weight in a model of Transformer Engine's layers."""
        weight = self._find(name)
        return weight.fill(weight.rule.te_name or weight.rule.megatron)

    def engine_name(self, name: str) -> str:
        """The former name of :meth:`te_name`."""
        said = "WeightMap.engine_name is now te_name; the old name goes with the next release"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return self.te_name(name)

    def expert(self, name: str) -> int | None:
        """The number of the expert that a Megatron weight belongs to, if it does."""
        weight = self._find(name)
        return weight.expert if "{e}" in weight.rule.megatron else None

    def stored_as(self, name: str) -> list[str]:
        """The names, one or two, under which ``torch_dist`` checkpoints hold a Megatron weight.

        Layers are numbered here even where they are stacked on disk; the experts of a layer share a name.
        """
        rule = self._find(name).rule
        return [self._find(name).fill(stored) for stored in rule.stored_as or (rule.te_name or rule.megatron,)]

    def stored_sections(self, name: str) -> dict[str, int]:
        """Rows of the sections that ``torch_dist`` checkpoints hold under keys of their own; empty without any."""
        rule = self._find(name).rule
        rows = self._section_rows(rule) if rule.stored_sections else []
        return dict(zip(rule.stored_sections, rows, strict=True))

    def megatron_shape(self, name: str) -> tuple[int, ...]:
        """The whole (not tensor-parallel) shape of a Megatron weight, with the vocabulary's padding."""
        return self._lengths(self._find(name).rule.dims)

    def hf_shape(self, hf_name: str) -> tuple[int, ...]:
        """The shape of a Hugging Face weight."""
        part = self._part(hf_name)
        lengths = self._lengths(part.dims)
        return (len(self._hf[hf_name]), *lengths) if part.stacked else lengths

    def to_hf(self, name: str, tensor: AnyTensor) -> list[tuple[str, AnyTensor]]:
        """The Hugging Face weights inside a Megatron weight, with copies: names and tensors, maybe views of ``tensor``.

        Args:
            name: Megatron's name. ``output_layer.weight`` of a tied model yields nothing.
            tensor: The whole weight; embedding and output layer may have any padding.

        Raises:
            WeightError: Unknown name, another shape than the config's, or one expert's where Hugging Face joins them.
        """
        if name == "output_layer.weight" and not self.shape.untie_embeddings_and_output_weights:
            return []
        weight = self._find(name)
        if any(part.stacked for part in weight.rule.hf):
            raise WeightError(f"{name} lies with those of other experts in {self.hf_parts(name)[0]}; use huggingface()")
        parts = list(zip(self.hf_parts(name), self._cut(name, weight, tensor), strict=True))
        copies = [copy for copy, original in hf_copies(self.shape).items() if original == parts[0][0]]
        return parts + [(copy, parts[0][1]) for copy in copies]

    def cut_rows(self, name: str, matrix: AnyTensor) -> list[AnyTensor]:
        """The rows of a matrix, cut as those of a Megatron weight are into :meth:`hf_parts`; it may have any columns.

        Such is the factor B of a LoRA adapter. Another number of rows than the weight's is a :class:`WeightError`.
        """
        rule: WeightRule = self._find(name).rule
        _check_shape(name, matrix, (*self._lengths(rule.dims)[:1], *matrix.shape[1:]))
        rows = [self._lengths(part.dims)[0] for part in rule.hf]
        return rule.layout.cut(matrix, rows, self._sizes)

    def huggingface(self, hf_name: str, load: Callable[[str], AnyTensor]) -> AnyTensor:
        """A Hugging Face weight from the Megatron weights that it lies in; ``load`` gives these, whole, by name.

        They may have any padding. One of another shape than the config says is a :class:`WeightError`.
        """
        found: list[AnyTensor] = []
        for name, number in self._hf[hf_name]:
            weight = self._weights[name]
            whole = load(name)
            if weight.rule.layout is LESS_ONE and isinstance(whole, LazyTensor):
                found.append(plus_one(whole, load(weight.fill(weight.rule.like)).dtype))
            else:
                found.append(self._cut(name, weight, whole)[number])
        if not self._part(hf_name).stacked:
            return found[0]
        return concat([part.reshape(1, *part.shape) for part in found])

    def from_hf(self, name: str, load: Callable[[str], AnyTensor]) -> AnyTensor:
        """A Megatron weight, whole, from its Hugging Face weights, which ``load`` gives by name.

        It has the shape :meth:`megatron_shape`; padded vocabulary rows are zero. It may share memory with what ``load``
        returned. An unknown name, or a weight of another shape than the config says, is a :class:`WeightError`.
        """
        weight = self._find(name)
        parts = [self._loaded(part, weight, load) for part in weight.rule.hf]
        whole: AnyTensor = weight.rule.layout.join(parts, self._sizes)
        return self.padded(name, whole)

    def padded(self, name: str, whole: AnyTensor) -> AnyTensor:
        """A whole Megatron weight whose vocabulary may have any padding, in the shape :meth:`megatron_shape`.

        Rows that are added are zero. A weight of another shape than the config says is a :class:`WeightError`.
        """
        dims: str = self._find(name).rule.dims
        wanted: tuple[int, ...] = self.megatron_shape(name)
        if dims.startswith("padded_vocab") and whole.shape[1:] == wanted[1:] and whole.shape[0] >= self._sizes["vocab"]:
            given, size = whole.shape[0], self._sizes["vocab"]
            own = whole if given == size else split(whole, [size, given - size])[0]
            rows = (wanted[0] - size, *wanted[1:])
            zeros: Any = LazyTensor.zeros(whole.dtype, rows) if isinstance(whole, LazyTensor) else whole.new_zeros(rows)
            padded: AnyTensor = concat([own, zeros]) if rows[0] else own
            return padded
        _check_shape(name, whole, wanted)
        return whole

    def split_axis(self, name: str) -> int | None:
        """The axis along which tensor-parallel ranks share a Megatron weight out; ``None`` if each holds it whole."""
        return self._find(name).rule.split

    def split_tp(self, name: str, tensor: AnyTensor, tp: int) -> list[AnyTensor]:
        """The shards of a Megatron weight for each of ``tp`` tensor-parallel ranks, over which it must divide."""
        rule = self._find(name).rule
        if rule.split is WHOLE:
            return [tensor] * tp
        units = self._units(rule, tensor)
        if any(unit % tp for unit in units):
            what = f"{name} of shape {tuple(tensor.shape)} has {', '.join(map(str, units))} units to split"
            raise WeightError(f"{what}, which do not divide over {tp} tensor-parallel ranks; use a divisor")
        if not rule.sections:
            return split(tensor, [tensor.shape[rule.split] // tp] * tp, rule.split)
        sections = split(tensor, self._section_rows(rule))
        shares = [split(section, [section.shape[0] // tp] * tp) for section in sections]
        return [concat(parts) for parts in zip(*shares, strict=True)]

    def merge_tp(self, name: str, shards: Sequence[AnyTensor]) -> AnyTensor:
        """A whole Megatron weight from its tensor-parallel shards in rank order."""
        rule = self._find(name).rule
        if len(shards) == 1:
            return shards[0]
        if rule.split is WHOLE:
            # Local layers split the projections to the latents, which Transformer Engine's keep whole on every rank.
            is_whole = tuple(shards[0].shape[:1]) == self._lengths(rule.dims)[:1]
            return _alike(name, shards) if is_whole else concat(shards)
        if not rule.sections:
            return concat(shards, rule.split)
        rows = [rows // len(shards) for rows in self._section_rows(rule)]
        shares = [split(shard, rows) for shard in shards]
        return concat([share[number] for number in range(len(rows)) for share in shares])

    def _units(self, rule: WeightRule, tensor: AnyTensor) -> list[int]:
        """Numbers of units that the ranks share out: whole query groups or heads of attention, else single rows."""
        if rule.sections:
            return self._section_rows(rule)
        axis = rule.split or ROWS
        latent = dict.fromkeys(("latent_query", "latent_key_value", "latent_value"), self._sizes["heads"])
        whole = latent | dict.fromkeys(("qkv", "gated_qkv", "query"), self._sizes["groups"])
        return [whole.get(rule.dims.split()[axis], tensor.shape[axis])]

    def _find(self, name: str) -> _Weight:
        try:
            return self._by_name[name]
        except KeyError:
            model = f"a {self.shape.family} model with {self.shape.num_layers} layers"
            like = list(self._weights)[1]
            advice = f"weights look like {like!r}; use whole-model layer numbers and no wrapper's prefix"
            raise WeightError(f"{name!r} is not a weight of {model}; {advice}") from None

    def _part(self, hf_name: str) -> HfPart:
        name, number = self._hf[hf_name][0]
        return self._weights[name].rule.hf[number]

    def _section_rows(self, rule: WeightRule) -> list[int]:
        return [self._sizes[dim] for dim in rule.sections]

    def _lengths(self, dims: str) -> tuple[int, ...]:
        if dims not in self._known_lengths:
            self._known_lengths[dims] = tuple(sum(self._sizes[part] for part in dim.split("+")) for dim in dims.split())
        return self._known_lengths[dims]

    def _cut(self, name: str, weight: _Weight, tensor: AnyTensor) -> list[AnyTensor]:
        """The Hugging Face tensors in a Megatron weight, which is without the vocabulary's padding then."""
        rule = weight.rule
        expected = self._lengths(rule.dims.replace("padded_vocab", "vocab"))
        padding = tensor.shape[0] - expected[0] if rule.dims.startswith("padded_vocab") and tensor.shape else 0
        if padding > 0 and len(tensor.shape) == 2:
            tensor = split(tensor, [expected[0], padding])[0]
        _check_shape(name, tensor, expected)
        rows = [self._lengths(part.dims)[0] for part in rule.hf]
        return rule.layout.cut(tensor, rows, self._sizes)

    def _loaded(self, part: HfPart, weight: _Weight, load: Callable[[str], AnyTensor]) -> AnyTensor:
        name = weight.fill(part.name)
        tensor, expected = load(name), self.hf_shape(name)
        _check_shape(name, tensor, expected)
        if not part.stacked:
            return tensor
        lengths = [weight.expert, 1, expected[0] - weight.expert - 1]
        return split(tensor, lengths)[1].reshape(*expected[1:])


def _alike(name: str, copies: Sequence[Any]) -> Any:
    """The weight of which each rank has a copy; a :class:`WeightError`, when it is read, if they differ."""
    first = copies[0]

    def checked() -> memoryview:
        for rank, copy in enumerate(copies[1:], 1):
            if not (are_equal(first, copy) if isinstance(first, LazyTensor) else first.equal(copy)):
                what = f"must be the same on each tensor-parallel rank, but differs between ranks 0 and {rank}"
                raise WeightError(f"{name} {what}; use a checkpoint whose ranks agree")
        return read_whole(first) if isinstance(first, LazyTensor) else memoryview(b"")

    if isinstance(first, LazyTensor):
        return LazyTensor.made(first.dtype, first.shape, checked)
    checked()
    return first


def _check_shape(name: str, tensor: Any, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise WeightError(f"{name} has shape {tuple(tensor.shape)}, but the model's config says {expected}")


def hf_copies(shape: ModelShape) -> dict[str, str]:
    """Hugging Face weights that may be there as copies of another, by name: prediction modules of some families have
    the embedding's and the output layer's."""
    originals = ("model.embed_tokens.weight", "lm_head.weight")[: 1 + shape.untie_embeddings_and_output_weights]
    return {
        copy.replace("{i}", str(shape.num_layers + module)): original
        for module in range(shape.mtp_num_layers)
        for copy, original in zip(FAMILIES[shape.family].mtp_copies, originals, strict=False)
    }


def check_weight_count(shape: ModelShape, tensors: Mapping[str, LazyTensor | TensorInfo], where: Path) -> None:
    """Refuse a shape that asks for far more weights than a checkpoint holds, before anything is built of it."""
    held = sum(tensor.shape[0] if len(tensor.shape) > 2 else 1 for tensor in tensors.values())
    # Without building their names: a layer counts as if it had every kind of weight.
    rules, modules = FAMILIES[shape.family].layer, shape.mtp_num_layers
    per_expert = sum("{e}" in rule.megatron for rule in rules)
    with_experts = sum(shape.moe_layer_freq) if isinstance(shape.moe_layer_freq, tuple) else shape.num_layers
    wanted = (shape.num_layers + modules) * (len(rules) - per_expert)
    wanted += (with_experts + modules) * per_expert * (shape.num_experts or 0)
    if wanted > 4 * held + 1000:
        raise WeightError(
            f"the config asks for about {wanted:,} weights, and {where} holds {held:,}; use the model's original config"
        )


def without_missing_modules(shape: ModelShape, names: Collection[str], where: Path) -> tuple[ModelShape, list[str]]:
    """The shape, without prediction modules if their weights are missing (transformers saves none), and a note."""
    modules = set(WeightMap(shape).module_names()) if shape.mtp_num_layers else set()
    if not modules or any(name in modules or name.startswith("mtp.") for name in names):
        return shape, []
    note = f"{where} lacks the model's prediction modules ({shape.mtp_num_layers}); the output is without them too"
    return replace(shape, mtp_num_layers=0), [note]


def _named_sizes(shape: ModelShape, padded_vocab_size: int) -> Mapping[str, int]:
    """Lengths of the dimensions that the tables name; 0 where the model has none."""
    heads, groups, head = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    plain, rotated, value = shape.qk_head_dim or 0, shape.qk_pos_emb_head_dim or 0, shape.v_head_dim or 0
    index_heads, index_head = shape.dsa_indexer_n_heads or 0, shape.dsa_indexer_head_dim or 0
    linear_key_heads, linear_value_heads = shape.linear_num_key_heads or 0, shape.linear_num_value_heads or 0
    return {
        "one": 1,
        "vocab": shape.vocab_size,
        "padded_vocab": padded_vocab_size,
        "hidden": shape.hidden_size,
        "heads": heads,
        "groups": groups,
        "head": head,
        "query": heads * head,
        "key": groups * head,
        "qkv": (heads + 2 * groups) * head,
        "gated_qkv": 2 * (heads + groups) * head,
        "ffn": shape.ffn_hidden_size,
        "experts": shape.num_experts or 0,
        "expert_ffn": shape.moe_ffn_hidden_size or 0,
        "shared_ffn": shape.moe_shared_expert_intermediate_size or 0,
        "rotated": rotated,
        "q_latent": shape.q_lora_rank or 0,
        "kv_latent": shape.kv_lora_rank or 0,
        "latent_query": heads * (plain + rotated),
        "latent_key_value": heads * (plain + value),
        "latent_value": heads * value,
        "index_heads": index_heads,
        "index_head": index_head,
        "index_query": index_heads * index_head,
        "linear_key_heads": linear_key_heads,
        "linear_value_heads": linear_value_heads,
        "linear_key": linear_key_heads * (shape.linear_key_head_dim or 0),
        "linear_value": linear_value_heads * (shape.linear_value_head_dim or 0),
        "linear_value_head": shape.linear_value_head_dim or 0,
        "kernel": shape.linear_conv_kernel_dim or 0,
    }


def _weights(shape: ModelShape, most_experts: int | None) -> Iterator[_Weight]:
    """The table's rows for each layer, in the model's order: rows of a layer stand together."""
    family, experts = FAMILIES[shape.family], shape.num_experts or 0
    experts = experts if most_experts is None else min(experts, most_experts)
    rules = [rule for rule in family.layer if _has(shape, rule.when)]
    yield _Weight(EMBEDDING, 0)
    for layer in range(shape.num_layers):
        yield from _layer_weights(shape, rules, experts, layer)
    for module in range(shape.mtp_num_layers):
        layer = shape.num_layers + module
        yield from (_Weight(rule, layer, module=module) for rule in family.mtp)
        yield from _layer_weights(shape, [in_module(rule, family) for rule in rules], experts, layer, module)
    yield from (_Weight(rule, 0) for rule in OUTPUT if _has(shape, rule.when))


def _has(shape: ModelShape, when: str) -> bool:
    return not when or bool(getattr(shape, when.removeprefix("!"))) != when.startswith("!")


def _layer_weights(
    shape: ModelShape, rules: Sequence[WeightRule], experts: int, layer: int, module: int = 0
) -> Iterator[_Weight]:
    for rule in rules:
        if not rule.layers or shape.has_layer(rule.layers, layer):
            count = experts if "{e}" in rule.megatron else 1
            yield from (_Weight(rule, layer, expert, module) for expert in range(count))
