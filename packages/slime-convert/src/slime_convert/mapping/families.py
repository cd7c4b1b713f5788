"""The weight tables, one per family: each row ties a Megatron weight to the Hugging Face weights inside it.

``{i}`` stands for the layer. Dimensions are named; :func:`named_sizes` gives their lengths for a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slime_convert.mapping.layouts import GATE_UP, GROUPED_QKV, ONE_TO_ONE, Layout
from slime_convert.mapping.tensor_parallel import TensorParallel
from slime_convert.shape import ModelShape


@dataclass(frozen=True)
class HfWeight:
    """A Hugging Face weight: its name with placeholders, and its dimensions by name."""

    name: str
    dims: str


@dataclass(frozen=True)
class Rule:
    """One row of a weight table.

    Attributes:
        megatron: Name in Megatron-core's GPTModel with local (not Transformer Engine) layers.
        dims: Its dimensions by name. ``padded_vocab`` is cut to ``vocab`` rows on the way to Hugging Face.
        hf: The Hugging Face weights that it is made of, in the layout's order.
        layout: How they are joined.
        split: How the Megatron weight is split over tensor-parallel ranks.
        engine_name: Its name when Transformer Engine fuses the norm into the linear layer, if another.
        when: Whether a model of a given shape has this weight.
    """

    megatron: str
    dims: str
    hf: tuple[HfWeight, ...]
    layout: Layout = ONE_TO_ONE
    split: TensorParallel = TensorParallel.REPLICATED
    engine_name: str | None = None
    when: Callable[[ModelShape], bool] = lambda _: True


def named_sizes(shape: ModelShape, padded_vocab_size: int) -> dict[str, int]:
    """Lengths of the dimensions that the tables name."""
    query = shape.num_attention_heads * shape.kv_channels
    key = shape.num_query_groups * shape.kv_channels
    return {
        "hidden": shape.hidden_size,
        "query": query,
        "key": key,
        "qkv": query + 2 * key,
        "head": shape.kv_channels,
        "ffn": shape.ffn_hidden_size,
        "gate_up": 2 * shape.ffn_hidden_size,
        "vocab": shape.vocab_size,
        "padded_vocab": padded_vocab_size,
    }


_LAYER, _HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."

_EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    "padded_vocab hidden",
    (HfWeight("model.embed_tokens.weight", "vocab hidden"),),
    split=TensorParallel.ROWS,
)
_OUTPUT = (
    Rule("decoder.final_layernorm.weight", "hidden", (HfWeight("model.norm.weight", "hidden"),)),
    Rule(
        "output_layer.weight",
        "padded_vocab hidden",
        (HfWeight("lm_head.weight", "vocab hidden"),),
        split=TensorParallel.ROWS,
        when=lambda shape: shape.untie_embeddings_and_output_weights,
    ),
)
_ATTENTION = (
    Rule(
        _LAYER + "input_layernorm.weight",
        "hidden",
        (HfWeight(_HF_LAYER + "input_layernorm.weight", "hidden"),),
        engine_name=_LAYER + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Rule(
        _LAYER + "self_attention.linear_qkv.weight",
        "qkv hidden",
        (
            HfWeight(_HF_LAYER + "self_attn.q_proj.weight", "query hidden"),
            HfWeight(_HF_LAYER + "self_attn.k_proj.weight", "key hidden"),
            HfWeight(_HF_LAYER + "self_attn.v_proj.weight", "key hidden"),
        ),
        layout=GROUPED_QKV,
        split=TensorParallel.ROWS,
    ),
    Rule(
        _LAYER + "self_attention.linear_proj.weight",
        "hidden query",
        (HfWeight(_HF_LAYER + "self_attn.o_proj.weight", "hidden query"),),
        split=TensorParallel.COLUMNS,
    ),
)
_QK_NORM = tuple(
    Rule(
        _LAYER + f"self_attention.{which}_layernorm.weight",
        "head",
        (HfWeight(_HF_LAYER + f"self_attn.{which}_norm.weight", "head"),),
    )
    for which in "qk"
)
_GATED_MLP = (
    Rule(
        _LAYER + "pre_mlp_layernorm.weight",
        "hidden",
        (HfWeight(_HF_LAYER + "post_attention_layernorm.weight", "hidden"),),
        engine_name=_LAYER + "mlp.linear_fc1.layer_norm_weight",
    ),
    Rule(
        _LAYER + "mlp.linear_fc1.weight",
        "gate_up hidden",
        (
            HfWeight(_HF_LAYER + "mlp.gate_proj.weight", "ffn hidden"),
            HfWeight(_HF_LAYER + "mlp.up_proj.weight", "ffn hidden"),
        ),
        layout=GATE_UP,
        split=TensorParallel.PAIRED_ROWS,
    ),
    Rule(
        _LAYER + "mlp.linear_fc2.weight",
        "hidden ffn",
        (HfWeight(_HF_LAYER + "mlp.down_proj.weight", "hidden ffn"),),
        split=TensorParallel.COLUMNS,
    ),
)

TABLES: Mapping[str, tuple[Rule, ...]] = {
    "llama": (_EMBEDDING, *_ATTENTION, *_GATED_MLP, *_OUTPUT),
    "qwen3": (_EMBEDDING, *_ATTENTION, *_QK_NORM, *_GATED_MLP, *_OUTPUT),
}
"""The weight table of each of :data:`slime_convert.shape.FAMILIES`."""
