"""The model families, by Hugging Face ``model_type``: what it implies that ``config.json`` does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a ``model_type`` implies.

    Attributes:
        qk_layernorm: Queries and keys pass an RMSNorm per head.
        head_dim: Channels of one head when the config has no ``head_dim``; ``None`` for hidden_size / heads.
        norm_epsilon: Of the norms when the config has no ``rms_norm_eps``.
        qkv_bias: The query, key and value projections have biases, unless the config says otherwise.
        reads_attention_bias: The config's ``attention_bias`` is about those three projections alone. Elsewhere it
            means the output projection too, or nothing.
        rotary_percent: Rotated part of a head's channels when the config has no ``partial_rotary_factor``; ``None``
            where every channel is rotated and the config cannot say otherwise.
        rotary_interleaved: The rotary embedding pairs neighbouring channels, not those half a head apart.
        experts: The MLP of some layers is a router and experts.
        sigmoid_router: The router scores experts by sigmoids with a bias, as DeepSeek V3's does; leading layers may be
            dense, an expert may be shared, and modules that predict further tokens may follow the layers.
        reads_qk_norm: The config's ``use_qk_norm`` says whether queries and keys are normalised.
        latent_attention: Queries, keys and values are made from low-rank latents.
        post_norms: The outputs of attention and MLP pass an RMSNorm before they join the residual stream.
    """

    qk_layernorm: bool = False
    head_dim: int | None = None
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    rotary_percent: float | None = None
    rotary_interleaved: bool = False
    post_norms: bool = False
    experts: bool = False
    sigmoid_router: bool = False
    reads_qk_norm: bool = False
    latent_attention: bool = False


_GLM = Family(
    head_dim=128,
    norm_epsilon=1.5625e-7,
    qkv_bias=True,
    reads_attention_bias=True,
    rotary_percent=0.5,
    rotary_interleaved=True,
)
_DEEPSEEK = Family(experts=True, sigmoid_router=True, latent_attention=True)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_layernorm=True, head_dim=128),
    "qwen3_moe": Family(qk_layernorm=True, experts=True),
    "glm": _GLM,
    "glm4_moe": Family(
        head_dim=128,
        norm_epsilon=1e-5,
        reads_attention_bias=True,
        rotary_percent=0.5,
        experts=True,
        sigmoid_router=True,
        reads_qk_norm=True,
    ),
    "glm4_moe_lite": replace(_DEEPSEEK, norm_epsilon=1e-5),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4": replace(_GLM, post_norms=True),
}
"""Every supported family."""

BRIDGES = ("mbridge",)
"""The words of ``--bridge``."""

BRIDGED_FAMILIES = ("mimo", "mixtral", "qwen2_moe")
"""Families that only a bridge knows."""


def unknown_family(model_type: Any, where: str) -> str:
    """The message about a ``model_type`` that is none of them."""
    return (
        f"model_type {model_type!r} of {where} is not supported; allowed: {', '.join(FAMILIES)}, "
        f"and {', '.join(BRIDGED_FAMILIES)} with --bridge {BRIDGES[0]}; convert a model of one of these families"
    )
