"""Megatron's shape flags: which a shape writes, and what a given one must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_convert.errors import ShapeMismatchError

if TYPE_CHECKING:
    from slime_convert.shape.model import ModelShape


def _always(_: ModelShape) -> bool:
    return True


def _never(_: ModelShape) -> bool:
    return False


@dataclass(frozen=True)
class ShapeFlag:
    """A shape flag of Megatron's command line.

    Attributes:
        name: As typed, such as ``--num-layers``.
        dest: Its name without dashes; the key in :func:`check_flags`.
        type: ``int``, ``float``, ``str``, or ``bool`` for a switch.
        help: One line, without the default.
        expected: The value that a shape asks for.
        emitted: Whether :meth:`ModelShape.to_megatron_flags` writes the flag.
        compared: Whether a given value must equal ``expected``.
    """

    name: str
    dest: str
    type: type
    help: str
    expected: Callable[[ModelShape], Any]
    emitted: Callable[[ModelShape], bool] = _always
    compared: bool = True

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool


def _field(name: str, type_: type, help_: str, **kwargs: Any) -> ShapeFlag:
    """A flag for the field of :class:`ModelShape` with its name; a switch is emitted when the field is true."""
    if type_ is bool:
        kwargs["emitted"] = lambda shape: getattr(shape, name)
    return ShapeFlag(_flag_name(name), name, type_, help_, lambda shape: getattr(shape, name), **kwargs)


def _fixed(name: str, value: Any, help_: str, **kwargs: Any) -> ShapeFlag:
    """A flag with one value for every supported family."""
    return ShapeFlag(_flag_name(name), name, type(value), help_, lambda _: value, **kwargs)


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _has_experts(shape: ModelShape) -> bool:
    return shape.num_experts is not None


def _is_grouped(shape: ModelShape) -> bool:
    return shape.num_query_groups < shape.num_attention_heads


SHAPE_FLAGS: tuple[ShapeFlag, ...] = (
    _fixed("swiglu", True, "gated MLP with SiLU"),
    _field("num_layers", int, "transformer layers"),
    _field("hidden_size", int, "channels of the residual stream"),
    _field("ffn_hidden_size", int, "channels between the MLP's two projections"),
    _field("num_attention_heads", int, "query heads"),
    # Megatron reads num_query_groups only with this switch; with as many groups as heads it changes nothing.
    _fixed("group_query_attention", True, "several query heads share a key-value head", emitted=_is_grouped),
    _field("num_query_groups", int, "key-value heads", emitted=_is_grouped),
    _field("kv_channels", int, "channels of one attention head"),
    _field("vocab_size", int, "rows of the embedding before padding"),
    # A shorter context than the config's is no contradiction: nothing in the weights depends on it.
    _field("max_position_embeddings", int, "longest context in tokens", compared=False),
    _fixed("use_rotary_position_embeddings", True, "rotary position embedding"),
    _fixed("position_embedding_type", "rope", "kind of position embedding", emitted=_never),
    _field("rotary_base", float, "base of the rotary wavelengths"),
    _field(
        "rotary_percent",
        float,
        "part of a head's channels that is rotated",
        emitted=lambda shape: shape.rotary_percent < 1,
    ),
    _field("rotary_interleaved", bool, "the rotary embedding pairs neighbouring channels"),
    _field("use_rope_scaling", bool, "Llama 3.x scaling of the low rotary frequencies"),
    _field(
        "rope_scaling_factor",
        float,
        "divisor of the low rotary frequencies",
        emitted=lambda shape: shape.use_rope_scaling,
    ),
    _fixed("normalization", "RMSNorm", "kind of normalization"),
    _field("norm_epsilon", float, "term added to the mean square in the norm"),
    _fixed("disable_bias_linear", True, "no biases in linear layers"),
    _field("add_qkv_bias", bool, "biases in the query, key and value projections"),
    _field("qk_layernorm", bool, "RMSNorm on each query and key head"),
    _field("post_self_attn_layernorm", bool, "RMSNorm on attention's output"),
    _field("post_mlp_layernorm", bool, "RMSNorm on the MLP's output"),
    _field("untie_embeddings_and_output_weights", bool, "an output layer with weights of its own"),
    _field("num_experts", int, "experts of a layer", emitted=_has_experts),
    _field("moe_ffn_hidden_size", int, "channels between an expert's two projections", emitted=_has_experts),
    _field("moe_router_topk", int, "experts per token", emitted=_has_experts),
    _field("moe_router_pre_softmax", bool, "the router's softmax is taken before the best experts are chosen"),
)
"""Every shape flag that is accepted, in the order in which they are written."""


def shape_flag_words(shape: ModelShape) -> list[str]:
    """The flags that give Megatron a shape, as words of a command line."""
    words: list[str] = []
    for flag in SHAPE_FLAGS:
        if flag.emitted(shape):
            words += [flag.name] if flag.is_switch else [flag.name, _text(flag.expected(shape))]
    return words


def check_flags(shape: ModelShape, given: Mapping[str, Any]) -> None:
    """Refuse flags that contradict a model's config.

    Args:
        shape: From the Hugging Face config.
        given: Values by ``dest`` of :data:`SHAPE_FLAGS`. ``None``, a switch that is ``False``, and other keys count
            as not given; a flag that is not given takes the config's value.

    Raises:
        ShapeMismatchError: One message with every contradiction.
    """
    wrong = [text for flag in SHAPE_FLAGS if (text := _contradiction(flag, shape, given.get(flag.dest)))]
    if wrong:
        raise ShapeMismatchError(
            f"{len(wrong)} shape flag{'s' * (len(wrong) > 1)} contradict{'s' * (len(wrong) == 1)} the model's config: "
            + "; ".join(wrong)
            + ". Leave the flags out (the config's values are used), or give the config that they describe"
        )


def _contradiction(flag: ShapeFlag, shape: ModelShape, value: Any) -> str | None:
    expected = flag.expected(shape)
    if value is None or value is False or not flag.compared:
        return None
    if flag.dest == "rope_scaling_factor" and not shape.use_rope_scaling:
        return f"{flag.name} {_text(value)} is given, but the config has no rope scaling"
    if expected is None:
        return f"{flag.name} {_text(value)} is given, but the config describes a model without experts"
    if flag.is_switch:
        return None if expected else f"{flag.name} is given, but the config says no"
    if value == expected or (flag.type is float and math.isclose(value, expected, rel_tol=1e-6)):
        return None
    return f"{flag.name} {_text(value)} is given, but the config says {_text(expected)}"


def _text(value: Any) -> str:
    """A value as it stands on a command line. Whole floats lose their fraction: Megatron reads some as integers."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
