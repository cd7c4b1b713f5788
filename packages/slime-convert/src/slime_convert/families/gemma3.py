"""Gemma 3, text only: zero-centred norms before and behind each half of a layer, windows, two rotary bases."""

from __future__ import annotations

from typing import Any

from slime_convert.families.config import HfConfig, rope_fields, window_fields
from slime_convert.families.family import ATTENTION, MLP, QK_NORM, Family, norm

_KINDS = {"sliding_attention": 1, "full_attention": 0}


def _rotary(config: HfConfig) -> dict[str, Any]:
    """The bases of both kinds of layers: the settings are nested (transformers 5) or stand apart (as published)."""
    given = config.get("rope_parameters")
    nested = given if isinstance(given, dict) and given.keys() & _KINDS.keys() else None
    theta = config.number("rope_theta", 1e6)
    if nested is None:
        full = {key: value for key in ("rope_parameters", "rope_scaling") if (value := config.get(key))}
        local: Any = {}
    else:
        full = {"rope_parameters": nested.get("full_attention") or {"rope_type": "default"}}
        local = nested.get("sliding_attention") or {}
    slides = HfConfig(
        local if isinstance(local, dict) else {"rope_type": local}, f"the local rotary settings of {config.where}"
    )
    slides.need("rope_type", None, "default")
    return {
        **rope_fields(HfConfig(full, config.where, {"rope_theta": theta}), ("default", "linear")),
        "rotary_base_local": slides.number("rope_theta", config.number("rope_local_base_freq", 1e4)),
    }


def _gemma3(config: HfConfig) -> dict[str, Any]:
    slides = config.layers_of("layer_types", _KINDS)
    slides = tuple(config.every("sliding_window_pattern", 6, but=True)) if slides is None else slides
    return {
        **_rotary(config),
        "swiglu": False,
        "gelu_tanh": True,
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "scale_embeddings": True,
        "softmax_scale": config.number("query_pre_attn_scalar") ** -0.5,
        **window_fields(config, slides),
    }


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    layer=(
        *ATTENTION,
        *QK_NORM,
        # megatron-core has no such norms: the names are those of slime-megatron's layer.
        norm("post_self_attn_layernorm", "post_attention_layernorm"),
        norm("pre_mlp_layernorm", "pre_feedforward_layernorm", fused_into="mlp.linear_fc1"),
        *MLP[1:],
        norm("post_mlp_layernorm", "post_feedforward_layernorm"),
    ),
    fields=_gemma3,
    allowed={
        "hidden_act": (None, "gelu_pytorch_tanh"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    ignored=frozenset({"layer_types"}),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    lacks="norms behind attention and MLP, a second rotary base, the embedding's factor, zero-centred norms without "
    "Transformer Engine",
    models="Gemma 3 270M, 1B; the text part of 4B to 27B stored as gemma3_text",
)

FAMILIES = (GEMMA3_TEXT,)
