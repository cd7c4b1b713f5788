"""The weight tables, one per family: each row ties a Megatron weight to the Hugging Face weights inside it.

``{i}`` stands for the layer and ``{e}`` for the expert. Dimensions are named; :func:`named_sizes` gives their lengths
for a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
        engine_name: Its name in a model of Transformer Engine's layers, if another: fused norms, grouped experts.
        stored_as: Its names in a ``torch_dist`` checkpoint, with the layer's number, if others than ``engine_name``'s
            or ``megatron``'s. Where models of local and of Transformer Engine's layers ask for different ones, both.
        when: Whether a model of a given shape has this weight.
        in_layer: Whether a layer of it has. Prediction modules count as further layers.
        copied_to: A second Hugging Face name for the same tensor in each prediction module.
    """

    megatron: str
    dims: str
    hf: tuple[HfWeight, ...]
    layout: Layout = ONE_TO_ONE
    split: TensorParallel = TensorParallel.REPLICATED
    engine_name: str | None = None
    stored_as: tuple[str, ...] = ()
    when: Callable[[ModelShape], bool] = lambda _: True
    in_layer: Callable[[ModelShape, int], bool] = lambda _, __: True
    copied_to: str | None = None


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
        **_latent_sizes(shape),
        "two_hidden": 2 * shape.hidden_size,
        "shared_ffn": shape.moe_shared_expert_intermediate_size or 0,
        "shared_gate_up": 2 * (shape.moe_shared_expert_intermediate_size or 0),
        "experts": shape.num_experts or 0,
        "expert_ffn": shape.moe_ffn_hidden_size or 0,
        "expert_gate_up": 2 * (shape.moe_ffn_hidden_size or 0),
        "vocab": shape.vocab_size,
        "padded_vocab": padded_vocab_size,
    }


def _latent_sizes(shape: ModelShape) -> dict[str, int]:
    heads, plain, rotated = shape.num_attention_heads, shape.qk_head_dim or 0, shape.qk_pos_emb_head_dim or 0
    latent, value = shape.kv_lora_rank or 0, shape.v_head_dim or 0
    return {
        "q_latent": shape.q_lora_rank or 0,
        "kv_latent": latent,
        "kv_latent_rotated": latent + rotated,
        "latent_query": heads * (plain + rotated),
        "latent_key_value": heads * (plain + value),
        "latent_value": heads * value,
    }


_LAYER, _HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."


def _norm(megatron: str, hf: str, dims: str, fused_into: str | None = None) -> Rule:
    """A norm in a layer, and the linear layer into which Transformer Engine fuses it."""
    return Rule(
        f"{_LAYER}{megatron}.weight",
        dims,
        (HfWeight(f"{_HF_LAYER}{hf}.weight", dims),),
        engine_name=f"{_LAYER}{fused_into}.layer_norm_weight" if fused_into else None,
    )


def _projection(
    megatron: str, dims: str, hf: Mapping[str, str], split: TensorParallel, layout: Layout = ONE_TO_ONE
) -> Rule:
    """The weight of a linear layer in a layer; ``hf`` gives the dimensions by name of each part."""
    parts = tuple(HfWeight(f"{_HF_LAYER}{name}.weight", part_dims) for name, part_dims in hf.items())
    return Rule(f"{_LAYER}{megatron}.weight", dims, parts, layout, split)


_EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    "padded_vocab hidden",
    (HfWeight("model.embed_tokens.weight", "vocab hidden"),),
    split=TensorParallel.ROWS,
    copied_to=f"{_HF_LAYER}embed_tokens.weight",
)
_OUTPUT = (
    Rule("decoder.final_layernorm.weight", "hidden", (HfWeight("model.norm.weight", "hidden"),)),
    Rule(
        "output_layer.weight",
        "padded_vocab hidden",
        (HfWeight("lm_head.weight", "vocab hidden"),),
        split=TensorParallel.ROWS,
        when=lambda shape: shape.untie_embeddings_and_output_weights,
        copied_to=f"{_HF_LAYER}shared_head.head.weight",
    ),
)
_ATTENTION = (
    _norm("input_layernorm", "input_layernorm", "hidden", fused_into="self_attention.linear_qkv"),
    _projection(
        "self_attention.linear_qkv",
        "qkv hidden",
        {"self_attn.q_proj": "query hidden", "self_attn.k_proj": "key hidden", "self_attn.v_proj": "key hidden"},
        TensorParallel.ROWS,
        GROUPED_QKV,
    ),
    _projection(
        "self_attention.linear_proj", "hidden query", {"self_attn.o_proj": "hidden query"}, TensorParallel.COLUMNS
    ),
)
_QKV_BIAS = Rule(
    f"{_LAYER}self_attention.linear_qkv.bias",
    "qkv",
    tuple(
        HfWeight(f"{_HF_LAYER}self_attn.{name}_proj.bias", dims)
        for name, dims in {"q": "query", "k": "key", "v": "key"}.items()
    ),
    GROUPED_QKV,
    TensorParallel.ROWS,
    when=lambda shape: shape.add_qkv_bias,
)
_QK_NORM = (
    _norm("self_attention.q_layernorm", "self_attn.q_norm", "head"),
    _norm("self_attention.k_layernorm", "self_attn.k_norm", "head"),
)
_MLP_NORM = _norm("pre_mlp_layernorm", "post_attention_layernorm", "hidden", fused_into="mlp.linear_fc1")
_MLP_DOWN = _projection("mlp.linear_fc2", "hidden ffn", {"mlp.down_proj": "hidden ffn"}, TensorParallel.COLUMNS)
_GATED_MLP = (
    _MLP_NORM,
    _projection(
        "mlp.linear_fc1",
        "gate_up hidden",
        {"mlp.gate_proj": "ffn hidden", "mlp.up_proj": "ffn hidden"},
        TensorParallel.PAIRED_ROWS,
        GATE_UP,
    ),
    _MLP_DOWN,
)
_JOINED_MLP = (
    _MLP_NORM,
    _projection("mlp.linear_fc1", "gate_up hidden", {"mlp.gate_up_proj": "gate_up hidden"}, TensorParallel.PAIRED_ROWS),
    _MLP_DOWN,
)
_EXPERT, _HF_EXPERT = f"{_LAYER}mlp.experts.", f"{_HF_LAYER}mlp.experts.{{e}}."


def _expert(
    megatron: str, dims: str, hf: Mapping[str, str], split: TensorParallel, layout: Layout = ONE_TO_ONE
) -> Rule:
    """A weight of one expert, by its number in the whole model."""
    return Rule(
        f"{_EXPERT}local_experts.{{e}}.{megatron}.weight",
        dims,
        tuple(HfWeight(f"{_HF_EXPERT}{name}.weight", part_dims) for name, part_dims in hf.items()),
        layout,
        split,
        engine_name=f"{_EXPERT}{megatron}.weight{{e}}",
        # Experts of both kinds are stored under one key with an axis of experts.
        stored_as=(f"{_EXPERT}experts.{megatron}.weight",),
    )


_EXPERTS = (
    Rule(
        f"{_LAYER}pre_mlp_layernorm.weight",
        "hidden",
        (HfWeight(f"{_HF_LAYER}post_attention_layernorm.weight", "hidden"),),
        # Transformer Engine's layers do not fuse it; local layers store it as if they did.
        stored_as=(f"{_LAYER}pre_mlp_layernorm.weight", f"{_LAYER}mlp.linear_fc1.layer_norm_weight"),
    ),
    Rule(f"{_LAYER}mlp.router.weight", "experts hidden", (HfWeight(f"{_HF_LAYER}mlp.gate.weight", "experts hidden"),)),
    _expert(
        "linear_fc1",
        "expert_gate_up hidden",
        {"gate_proj": "expert_ffn hidden", "up_proj": "expert_ffn hidden"},
        TensorParallel.PAIRED_ROWS,
        GATE_UP,
    ),
    _expert("linear_fc2", "hidden expert_ffn", {"down_proj": "hidden expert_ffn"}, TensorParallel.COLUMNS),
)
_ROUTER_BIAS = Rule(
    f"{_LAYER}mlp.router.expert_bias",
    "experts",
    (HfWeight(f"{_HF_LAYER}mlp.gate.e_score_correction_bias", "experts"),),
)
_SHARED_EXPERT = tuple(
    replace(rule, when=lambda shape: shape.moe_shared_expert_intermediate_size is not None)
    for rule in (
        _projection(
            "mlp.shared_experts.linear_fc1",
            "shared_gate_up hidden",
            {
                "mlp.shared_experts.gate_proj": "shared_ffn hidden",
                "mlp.shared_experts.up_proj": "shared_ffn hidden",
            },
            TensorParallel.PAIRED_ROWS,
            GATE_UP,
        ),
        _projection(
            "mlp.shared_experts.linear_fc2",
            "hidden shared_ffn",
            {"mlp.shared_experts.down_proj": "hidden shared_ffn"},
            TensorParallel.COLUMNS,
        ),
    )
)


def _dense_first(dense: Sequence[Rule], experts: Sequence[Rule]) -> tuple[Rule, ...]:
    """The MLP of the leading layers, then the experts of the others."""
    return (
        *(replace(rule, in_layer=lambda shape, layer: not shape.has_experts(layer)) for rule in dense),
        *(replace(rule, in_layer=lambda shape, layer: shape.has_experts(layer)) for rule in experts),
    )


def _both_names(rule: Rule) -> Rule:
    """A norm that Transformer Engine fuses, in a layer whose local form keeps the norm's own name on disk."""
    return replace(rule, stored_as=tuple(filter(None, (rule.engine_name, rule.megatron))))


_HAS_Q_LATENT: Callable[[ModelShape], bool] = lambda shape: shape.q_lora_rank is not None  # noqa: E731
# The projections to the latents are whole on every rank in Transformer Engine's layers.
_LATENT_ATTENTION = (
    _norm("input_layernorm", "input_layernorm", "hidden"),
    replace(
        _projection(
            "self_attention.linear_q_proj",
            "latent_query hidden",
            {"self_attn.q_proj": "latent_query hidden"},
            TensorParallel.ROWS,
        ),
        when=lambda shape: shape.q_lora_rank is None,
    ),
    *(
        replace(rule, when=_HAS_Q_LATENT)
        for rule in (
            _projection(
                "self_attention.linear_q_down_proj",
                "q_latent hidden",
                {"self_attn.q_a_proj": "q_latent hidden"},
                TensorParallel.REPLICATED,
            ),
            _both_names(
                _norm(
                    "self_attention.q_layernorm",
                    "self_attn.q_a_layernorm",
                    "q_latent",
                    fused_into="self_attention.linear_q_up_proj",
                )
            ),
            _projection(
                "self_attention.linear_q_up_proj",
                "latent_query q_latent",
                {"self_attn.q_b_proj": "latent_query q_latent"},
                TensorParallel.ROWS,
            ),
        )
    ),
    _projection(
        "self_attention.linear_kv_down_proj",
        "kv_latent_rotated hidden",
        {"self_attn.kv_a_proj_with_mqa": "kv_latent_rotated hidden"},
        TensorParallel.REPLICATED,
    ),
    _both_names(
        _norm(
            "self_attention.kv_layernorm",
            "self_attn.kv_a_layernorm",
            "kv_latent",
            fused_into="self_attention.linear_kv_up_proj",
        )
    ),
    _projection(
        "self_attention.linear_kv_up_proj",
        "latent_key_value kv_latent",
        {"self_attn.kv_b_proj": "latent_key_value kv_latent"},
        TensorParallel.ROWS,
    ),
    _projection(
        "self_attention.linear_proj",
        "hidden latent_value",
        {"self_attn.o_proj": "hidden latent_value"},
        TensorParallel.COLUMNS,
    ),
)
_SIGMOID_EXPERTS = (*_EXPERTS, _ROUTER_BIAS, *_SHARED_EXPERT)
# In latent attention's layers the norm before the router has one name only, that before an MLP two.
_LATENT_MLPS = _dense_first(
    (_both_names(_MLP_NORM), *_GATED_MLP[1:]),
    (replace(_SIGMOID_EXPERTS[0], stored_as=()), *_SIGMOID_EXPERTS[1:]),
)
_DEEPSEEK = (_EMBEDDING, *_LATENT_ATTENTION, *_LATENT_MLPS, *_OUTPUT)
_QK_NORM_IF_ANY = tuple(replace(rule, when=lambda shape: shape.qk_layernorm) for rule in _QK_NORM)

_MTP = "mtp.layers.{m}."
MTP_RULES = (
    Rule(f"{_MTP}enorm.weight", "hidden", (HfWeight(f"{_HF_LAYER}enorm.weight", "hidden"),)),
    Rule(f"{_MTP}hnorm.weight", "hidden", (HfWeight(f"{_HF_LAYER}hnorm.weight", "hidden"),)),
    Rule(
        f"{_MTP}eh_proj.weight",
        "hidden two_hidden",
        (HfWeight(f"{_HF_LAYER}eh_proj.weight", "hidden two_hidden"),),
        split=TensorParallel.ROWS,
    ),
    Rule(f"{_MTP}final_layernorm.weight", "hidden", (HfWeight(f"{_HF_LAYER}shared_head.norm.weight", "hidden"),)),
)
"""The weights of a prediction module, ``{m}``, beside those of the layer inside it."""


def in_mtp(rule: Rule) -> Rule:
    """The row of a layer's weight for the layer inside a prediction module."""

    def moved(name: str) -> str:
        return name.replace(_LAYER, f"{_MTP}transformer_layer.")

    return replace(
        rule,
        megatron=moved(rule.megatron),
        engine_name=moved(rule.engine_name) if rule.engine_name else None,
        stored_as=tuple(map(moved, rule.stored_as)),
    )


# megatron-core has no such norms: the names are those of slime-megatron's layer.
_POST_NORMS = (
    _norm("post_self_attn_layernorm", "post_self_attn_layernorm", "hidden"),
    _norm("post_mlp_layernorm", "post_mlp_layernorm", "hidden"),
)

TABLES: Mapping[str, tuple[Rule, ...]] = {
    "llama": (_EMBEDDING, *_ATTENTION, *_GATED_MLP, *_OUTPUT),
    "qwen2": (_EMBEDDING, *_ATTENTION, _QKV_BIAS, *_GATED_MLP, *_OUTPUT),
    "qwen3": (_EMBEDDING, *_ATTENTION, *_QK_NORM, *_GATED_MLP, *_OUTPUT),
    "qwen3_moe": (_EMBEDDING, *_ATTENTION, *_QK_NORM, *_EXPERTS, *_OUTPUT),
    "glm4_moe": (
        _EMBEDDING,
        *_ATTENTION,
        _QKV_BIAS,
        *_QK_NORM_IF_ANY,
        *_dense_first(_GATED_MLP, _SIGMOID_EXPERTS),
        *_OUTPUT,
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm": (_EMBEDDING, *_ATTENTION, _QKV_BIAS, *_JOINED_MLP, *_OUTPUT),
    "glm4": (_EMBEDDING, *_ATTENTION, _QKV_BIAS, *_JOINED_MLP, *_POST_NORMS, *_OUTPUT),
}
"""The weight table of each of :data:`slime_convert.shape.FAMILIES`."""
