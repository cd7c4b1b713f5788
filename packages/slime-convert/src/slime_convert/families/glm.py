"""GLM-4 (dense) and GLM-4.5 to 4.7 (with experts)."""

from __future__ import annotations

from typing import Any

from slime_convert.families.config import HfConfig, rope_fields
from slime_convert.families.deepseek import MTP, MTP_COPIES, SIGMOID_ALLOWED, SIGMOID_EXPERTS, sigmoid_router_fields
from slime_convert.families.family import ATTENTION, MLP, QK_NORM, QKV_BIAS, ROWS, Family, mlp_or_experts, norm, weight

_GATE_UP = weight("mlp.linear_fc1.weight", "ffn+ffn hidden", "mlp.gate_up_proj.weight", ROWS)
_JOINED_MLP = (MLP[0], _GATE_UP, MLP[2])
# megatron-core has no such norms: the names are those of slime-megatron's layer.
_POST_NORMS = (
    norm("post_self_attn_layernorm", "post_self_attn_layernorm"),
    norm("post_mlp_layernorm", "post_mlp_layernorm"),
)
_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (None, False, True)}  # of the three input projections alone


def _glm(config: HfConfig) -> dict[str, Any]:
    return {
        **rope_fields(config, ("default",), partial=True),
        "rotary_interleaved": True,
        "add_qkv_bias": config.switch("attention_bias", True),
    }


GLM = Family(
    model_type="glm",
    layer=(*ATTENTION, QKV_BIAS, *_JOINED_MLP),
    fields=_glm,
    allowed=_BIAS,
    defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    models="GLM-4-9B (the -hf form)",
)
GLM4 = GLM.named(
    "glm4",
    layer=(*ATTENTION, QKV_BIAS, *_JOINED_MLP, *_POST_NORMS),
    fields=lambda config: {**_glm(config), "post_self_attn_layernorm": True, "post_mlp_layernorm": True},
    lacks="norms behind attention and MLP (slime-megatron has them)",
    models="GLM-4-0414, GLM-Z1 (9B, 32B)",
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    layer=(*ATTENTION, QKV_BIAS, *QK_NORM, *mlp_or_experts(SIGMOID_EXPERTS)),
    fields=lambda config: {
        **sigmoid_router_fields(config),
        **rope_fields(config, ("default",), partial=True),
        "qk_layernorm": config.switch("use_qk_norm"),
        "add_qkv_bias": config.switch("attention_bias"),
    },
    allowed=SIGMOID_ALLOWED | _BIAS,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    mtp=MTP,
    mtp_copies=MTP_COPIES,
    models="GLM-4.5, 4.5-Air, 4.6, 4.7",
)

FAMILIES = (GLM, GLM4, GLM4_MOE)
