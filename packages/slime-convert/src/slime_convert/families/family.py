"""A model family: its weight table, and the meaning of its ``config.json``. Tables are data.

A row of a table ties a Megatron weight to the Hugging Face weights inside it. ``{i}`` stands for the layer, ``{e}`` for
the expert, ``{m}`` for the prediction module (which counts as layer ``{i}`` after the last). Dimensions are named;
:mod:`slime_convert.mapping` knows their lengths. ``a+b`` is one dimension: of length a, then b.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any

from slime_convert.families.config import HfConfig
from slime_convert.families.layouts import GATED_QKV, GROUPED_QKV, IN_ORDER, Layout
from slime_convert.former_names import former

LAYER, HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."
MTP = "mtp.layers.{m}."

WHOLE, ROWS, COLUMNS = None, 0, 1
"""How tensor-parallel ranks split a weight: not at all, or along the axis of that number."""


@dataclass(frozen=True)
class HfPart:
    """A Hugging Face weight, its name with placeholders.

    If ``stacked``, all experts lie in one tensor, and this is the part of ``{e}``, without the axis of experts.
    """

    name: str
    dims: str
    stacked: bool = False


@dataclass(frozen=True)
class WeightRule:
    """One row of a weight table.

    Attributes:
        megatron: Name in megatron-core's GPTModel with local (not Transformer Engine) layers.
        dims: Its dimensions by name. ``padded_vocab`` is cut to ``vocab`` rows on the way to Hugging Face. Rows ``a+b``
            are split over tensor-parallel ranks section by section (gate and up projections, say).
        hf: The Hugging Face weights that it is made of, in the layout's order.
        layout: How they are joined.
        split: The axis along which tensor-parallel ranks split it, if they do.
        stored_sections: Names of the sections, where ``torch_dist`` checkpoints hold each under a key of its own.
        te_name: Its name in a model of Transformer Engine's layers, if another: fused norms, grouped experts.
        stored_as: Its names in a ``torch_dist`` checkpoint, with the layer's number, if others than ``te_name``'s
            or ``megatron``'s. Where models of local and of Transformer Engine's layers ask for different ones, both.
        when: A field of the shape that a model with this weight has; with ``!`` in front, that it does not have.
        layers: The kind of layers that have it: ``experts`` or ``dense``, ``linear`` or ``full`` attention; of any
            kind if empty.
        like: Megatron's name of the weight whose type this has in Hugging Face, where Megatron stores another.
    """

    megatron: str
    dims: str
    hf: tuple[HfPart, ...]
    layout: Layout = IN_ORDER
    split: int | None = WHOLE
    stored_sections: tuple[str, ...] = ()
    te_name: str | None = None
    stored_as: tuple[str, ...] = ()
    when: str = ""
    layers: str = ""
    like: str = ""
    engine_name: InitVar[str | None] = None  # the former name of te_name

    def __post_init__(self, engine_name: str | None) -> None:
        if engine_name is not None and self.te_name is None:
            said = "engine_name= of a weight's row is now te_name=; the old name goes with the next release"
            warnings.warn(said, DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "te_name", engine_name)

    @property
    def sections(self) -> list[str]:
        """The dimensions of the rows' sections; empty if the rows are one."""
        rows = self.dims.split()[0]
        return rows.split("+") if "+" in rows and self.split is not WHOLE else []


WeightRule.engine_name = property(lambda rule: rule.te_name)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``: its weights, and the meaning of its config.

    Attributes:
        model_type: Hugging Face's name of it.
        layer: The weights of a layer, of every kind of layers. Embedding, last norm and output layer are everywhere.
        fields: Fields of the shape that ``config.json`` gives beyond those that every family has, or others than those.
        allowed: Values of settings that change the model in ways that the table carries; ``None`` is for one that is
            left out. Others are refused.
        ignored: Settings of every family that this one does not read.
        defaults: What counts where ``config.json`` leaves a key out.
        mtp: The weights of a prediction module in addition to those of the layer inside it.
        mtp_layer: Hugging Face's prefix of the layer inside a prediction module.
        mtp_copies: Hugging Face names, in a prediction module, of copies of the embedding and the output layer.
        lacks: What stock megatron-core 0.16.1 lacks to run it, for the table of what is proven; empty if nothing.
        models: Some published models, for the same.
    """

    model_type: str
    layer: tuple[WeightRule, ...]
    fields: Callable[[HfConfig], Mapping[str, Any]] = lambda _: {}
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mtp: tuple[WeightRule, ...] = ()
    mtp_layer: str = HF_LAYER
    mtp_copies: tuple[str, ...] = ()
    lacks: str = ""
    models: str = ""

    def named(self, model_type: str, **changes: Any) -> Family:
        """The same family under another name, with changes."""
        return replace(self, model_type=model_type, **changes)


def norm(megatron: str, hf: str, dims: str = "hidden", fused_into: str | None = None, **more: Any) -> WeightRule:
    """A norm in a layer, and the linear layer into which Transformer Engine fuses it."""
    te_name = f"{LAYER}{fused_into}.layer_norm_weight" if fused_into else None
    return weight(f"{megatron}.weight", dims, f"{hf}.weight", te_name=te_name, **more)


def weight(
    megatron: str,
    dims: str,
    hf: Mapping[str, str] | str,
    split: int | None = WHOLE,
    layout: Layout = IN_ORDER,
    **more: Any,
) -> WeightRule:
    """A weight or bias in a layer.

    Args:
        megatron: Its name in the layer, such as ``mlp.linear_fc2.weight``.
        dims: Its dimensions by name.
        hf: Name in the layer and dimensions of each part; a name alone for one part of the same dimensions. In an
            expert's weight, a name without ``{e}`` holds all experts.
        split: The axis along which tensor-parallel ranks split it.
        layout: How parts are joined.
        more: As :class:`WeightRule` has it.
    """
    named = {hf: dims} if isinstance(hf, str) else hf
    of_expert = "{e}" in megatron
    parts = tuple(HfPart(HF_LAYER + name, rows, of_expert and "{e}" not in name) for name, rows in named.items())
    return WeightRule(LAYER + megatron, dims, parts, layout, split, **more)


def expert(megatron: str, *args: Any) -> WeightRule:
    """A weight of one expert (by its number in the whole model), such as ``linear_fc1.weight``; see :func:`weight`."""
    return weight(
        f"mlp.experts.local_experts.{{e}}.{megatron}",
        *args,
        te_name=f"{LAYER}mlp.experts.{megatron}{{e}}",
        # Experts of both kinds are stored under one key with an axis of experts.
        stored_as=(f"{LAYER}mlp.experts.experts.{megatron}",),
    )


def also(rules: Sequence[WeightRule], **changes: Any) -> tuple[WeightRule, ...]:
    """Rules with changes, such as ``layers="experts"``."""
    return tuple(replace(rule, **changes) for rule in rules)


_VOCABULARY = "padded_vocab hidden"
EMBEDDING = WeightRule(
    "embedding.word_embeddings.weight", _VOCABULARY, (HfPart("model.embed_tokens.weight", "vocab hidden"),), split=ROWS
)
OUTPUT = (
    WeightRule("decoder.final_layernorm.weight", "hidden", (HfPart("model.norm.weight", "hidden"),)),
    WeightRule(
        "output_layer.weight",
        _VOCABULARY,
        (HfPart("lm_head.weight", "vocab hidden"),),
        split=ROWS,
        when="untie_embeddings_and_output_weights",
    ),
)


def qkv(kind: str, layout: Layout = GROUPED_QKV, **more: Any) -> WeightRule:
    """The joined projection of queries, keys and values: its ``weight`` or its ``bias``."""
    whole, query = ("gated_qkv", "query+query") if layout is GATED_QKV else ("qkv", "query")
    columns = " hidden" if kind == "weight" else ""
    parts = {f"self_attn.{n}_proj.{kind}": rows + columns for n, rows in (("q", query), ("k", "key"), ("v", "key"))}
    return weight(f"self_attention.linear_qkv.{kind}", whole + columns, parts, ROWS, layout, **more)


def gate_and_up(megatron: str, ffn: str, gate: str, up: str, make: Callable[..., WeightRule] = weight) -> WeightRule:
    """The joined gate and up projections of an MLP with ``ffn`` channels, by their names in both."""
    return make(megatron, f"{ffn}+{ffn} hidden", dict.fromkeys((gate, up), f"{ffn} hidden"), ROWS)


def attention(layout: Layout = GROUPED_QKV) -> tuple[WeightRule, ...]:
    """The weights of attention and of the norm before it."""
    return (
        norm("input_layernorm", "input_layernorm", fused_into="self_attention.linear_qkv"),
        qkv("weight", layout),
        weight("self_attention.linear_proj.weight", "hidden query", "self_attn.o_proj.weight", COLUMNS),
    )


ATTENTION = attention()
QKV_BIAS = qkv("bias", when="add_qkv_bias")
QK_NORM = (
    norm("self_attention.q_layernorm", "self_attn.q_norm", "head", when="qk_layernorm"),
    norm("self_attention.k_layernorm", "self_attn.k_norm", "head", when="qk_layernorm"),
)
MLP = (
    norm("pre_mlp_layernorm", "post_attention_layernorm", fused_into="mlp.linear_fc1"),
    gate_and_up("mlp.linear_fc1.weight", "ffn", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    weight("mlp.linear_fc2.weight", "hidden ffn", "mlp.down_proj.weight", COLUMNS),
)
EXPERTS_NORM = norm(
    "pre_mlp_layernorm",
    "post_attention_layernorm",
    # Transformer Engine's layers do not fuse it; local layers store it as if they did.
    stored_as=(f"{LAYER}pre_mlp_layernorm.weight", f"{LAYER}mlp.linear_fc1.layer_norm_weight"),
)


def experts(
    prefix: str = "mlp.experts.{e}.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[WeightRule, ...]:
    """The two weights of each expert, by Hugging Face's names of its three projections."""
    return (
        gate_and_up("linear_fc1.weight", "expert_ffn", f"{prefix}{gate}.weight", f"{prefix}{up}.weight", make=expert),
        expert("linear_fc2.weight", "hidden expert_ffn", f"{prefix}{down}.weight", COLUMNS),
    )


def shared_expert(name: str) -> tuple[WeightRule, ...]:
    """The weights of the expert that every token passes, if there is one, by its name in Hugging Face."""
    own = "mlp.shared_experts."
    rules = (
        gate_and_up(f"{own}linear_fc1.weight", "shared_ffn", f"{name}.gate_proj.weight", f"{name}.up_proj.weight"),
        weight(f"{own}linear_fc2.weight", "hidden shared_ffn", f"{name}.down_proj.weight", COLUMNS),
    )
    gate = weight(f"{own}gate_weight", "one hidden", f"{name}_gate.weight", when="moe_shared_expert_gate")
    return (*also(rules, when="moe_shared_expert_intermediate_size"), gate)


EXPERTS = (EXPERTS_NORM, weight("mlp.router.weight", "experts hidden", "mlp.gate.weight"), *experts())


def mlp_or_experts(experts: Sequence[WeightRule], mlp: Sequence[WeightRule] = MLP) -> tuple[WeightRule, ...]:
    """The weights of layers with either experts or an MLP."""
    return (*also(mlp, layers="dense"), *also(experts, layers="experts"))


def mtp_rules(
    prefix: str, enorm: str, hnorm: str, eh_proj: str, final_norm: str, layout: Layout = IN_ORDER
) -> tuple[WeightRule, ...]:
    """The weights of a prediction module in addition to those of the layer inside it, by Hugging Face's names."""

    def rule(megatron: str, hf: str, dims: str = "hidden", **more: Any) -> WeightRule:
        return WeightRule(f"{MTP}{megatron}.weight", dims, (HfPart(f"{prefix}{hf}.weight", dims),), **more)

    return (
        rule("enorm", enorm),
        rule("hnorm", hnorm),
        rule("eh_proj", eh_proj, "hidden hidden+hidden", layout=layout, split=ROWS),
        rule("final_layernorm", final_norm),
    )


def in_module(rule: WeightRule, family: Family) -> WeightRule:
    """The row of a layer's weight for the layer inside a prediction module."""

    def moved(name: str) -> str:
        return name.replace(LAYER, f"{MTP}transformer_layer.")

    return replace(
        rule,
        megatron=moved(rule.megatron),
        hf=tuple(replace(part, name=part.name.replace(HF_LAYER, family.mtp_layer)) for part in rule.hf),
        te_name=moved(rule.te_name) if rule.te_name else None,
        stored_as=tuple(map(moved, rule.stored_as)),
        like=moved(rule.like),
    )


__getattr__ = partial(former, __name__)
