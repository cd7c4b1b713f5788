"""Megatron's shape flags: which a shape writes, and what a given one must equal."""

from __future__ import annotations

import ast
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


def _has_groups(shape: ModelShape) -> bool:
    return shape.moe_router_num_groups is not None


def _is_latent(shape: ModelShape) -> bool:
    return shape.multi_latent_attention


def _has_yarn(shape: ModelShape) -> bool:
    return shape.rope_type == "yarn"


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
    _field("kv_channels", int, "channels of one attention head", emitted=lambda shape: not _is_latent(shape)),
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
    _field("moe_router_score_function", str, "how the router scores experts", emitted=_has_experts),
    _field("moe_router_enable_expert_bias", bool, "a bias on the experts' scores when the best are chosen"),
    _field(
        "moe_router_topk_scaling_factor",
        float,
        "factor on the chosen experts' weights",
        emitted=lambda shape: shape.moe_router_topk_scaling_factor != 1,
    ),
    _field("moe_router_num_groups", int, "groups of experts", emitted=_has_groups),
    _field("moe_router_group_topk", int, "groups of which experts are chosen", emitted=_has_groups),
    _field(
        "moe_shared_expert_intermediate_size",
        int,
        "channels of the expert that every token passes",
        emitted=lambda shape: shape.moe_shared_expert_intermediate_size is not None,
    ),
    ShapeFlag(
        "--moe-layer-freq",
        "moe_layer_freq",
        str,
        "which layers have experts: 1 for all, or a list with 0 or 1 for each, such as ([0]*3+[1]*58)",
        lambda shape: _layer_pattern(shape.moe_layer_freq),
        emitted=lambda shape: shape.num_dense_layers > 0,
    ),
    _field(
        "mtp_num_layers", int, "modules that predict a further token", emitted=lambda shape: shape.mtp_num_layers > 0
    ),
    _field("multi_latent_attention", bool, "queries, keys and values from low-rank latents"),
    _field("q_lora_rank", int, "channels of the queries' latent", emitted=lambda shape: shape.q_lora_rank is not None),
    _field("kv_lora_rank", int, "channels of the latent of keys and values", emitted=_is_latent),
    _field("qk_head_dim", int, "channels of a query or key head without rotary position", emitted=_is_latent),
    _field("qk_pos_emb_head_dim", int, "channels of a query or key head with rotary position", emitted=_is_latent),
    _field("v_head_dim", int, "channels of a value head", emitted=_is_latent),
    _field("rope_type", str, "rope, or yarn for scaled rotary frequencies", emitted=_is_latent),
    _field("rotary_scaling_factor", float, "YaRN's factor on the context length", emitted=_has_yarn),
    _field("original_max_position_embeddings", int, "context length before YaRN's scaling", emitted=_has_yarn),
    _field("beta_fast", float, "YaRN's bound of fast rotations", emitted=lambda shape: shape.beta_fast != 32),
    _field("beta_slow", float, "YaRN's bound of slow rotations", emitted=lambda shape: shape.beta_slow != 1),
    _field("mscale", float, "YaRN's coefficient of the rotated channels' factor", emitted=_has_yarn),
    _field("mscale_all_dim", float, "YaRN's coefficient of the attention scores' factor", emitted=_has_yarn),
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
    if flag.dest == "kv_channels" and shape.multi_latent_attention:
        return None  # Megatron does not read it then
    if flag.dest == "moe_layer_freq" and shape.num_experts is not None:
        wanted = [int(shape.has_experts(layer)) for layer in range(shape.num_layers)]
        if _layers_with_experts(value, shape.num_layers) == wanted:
            return None
    if flag.dest == "rope_scaling_factor" and not shape.use_rope_scaling:
        return f"{flag.name} {_text(value)} is given, but the config has no rope scaling"
    if expected is None:
        return f"{flag.name} {_text(value)} is given, but the config has no such setting"
    if flag.is_switch:
        return None if expected else f"{flag.name} is given, but the config says no"
    if value == expected or (flag.type is float and math.isclose(value, expected, rel_tol=1e-6)):
        return None
    return f"{flag.name} {_text(value)} is given, but the config says {_text(expected)}"


def _layer_pattern(freq: int | list[int]) -> str:
    """``--moe-layer-freq`` as a word: a number, or the short form of a list of zeros, then ones."""
    return str(freq) if isinstance(freq, int) else f"([0]*{freq.count(0)}+[1]*{freq.count(1)})"


def _layers_with_experts(text: str, num_layers: int) -> list[int] | None:
    """What ``--moe-layer-freq`` says, a 0 or 1 for each layer; ``None`` if Megatron would not understand it."""
    try:
        value: list[int] | int = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return None
    if isinstance(value, int):
        return [int(layer % value == 0) for layer in range(num_layers)] if value > 0 else None
    return value


def _evaluate(node: ast.expr) -> Any:
    """Lists of integers, their sums and repetitions; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10_000:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right
    raise ValueError


def _text(value: Any) -> str:
    """A value as it stands on a command line. Whole floats lose their fraction: Megatron reads some as integers."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
