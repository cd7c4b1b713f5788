"""gpt-oss: biases everywhere, attention sinks, windows, and all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from slime_convert.families.config import HfConfig, expert_fields, rope_fields, window_fields
from slime_convert.families.family import ATTENTION, COLUMNS, EXPERTS_NORM, ROWS, Family, expert, qkv, weight
from slime_convert.families.layouts import PAIRED_ROWS, TRANSPOSED, TRANSPOSED_PAIRS

# The config's class has it where the settings are left out.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GATE_UP = "expert_ffn+expert_ffn"
_GATE_UP_PROJ = {"mlp.experts.gate_up_proj": f"hidden {_GATE_UP}"}
_DOWN_PROJ = {"mlp.experts.down_proj": "expert_ffn hidden"}


def _gpt_oss(config: HfConfig) -> dict[str, Any]:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = config.updated({"rope_scaling": _YARN})
    slides = config.layers_of("layer_types", {"sliding_attention": 1, "full_attention": 0})
    if slides is None:
        slides = tuple(int(layer % 2 == 0) for layer in range(config.layers))
    return {
        **rope_fields(config, ("default", "yarn")),
        **expert_fields(config.updated({"norm_topk_prob": True}), normalised=True),
        "moe_ffn_hidden_size": config.integer("intermediate_size"),
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.number("swiglu_limit"),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        **window_fields(config, slides),
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    layer=(
        *ATTENTION,
        qkv("bias"),
        weight("self_attention.linear_proj.bias", "hidden", "self_attn.o_proj.bias"),
        weight("self_attention.core_attention.softmax_offset", "heads", "self_attn.sinks", ROWS),
        EXPERTS_NORM,
        weight("mlp.router.weight", "experts hidden", "mlp.router.weight"),
        weight("mlp.router.bias", "experts", "mlp.router.bias"),
        expert("linear_fc1.weight", f"{_GATE_UP} hidden", _GATE_UP_PROJ, ROWS, TRANSPOSED_PAIRS),
        expert("linear_fc1.bias", _GATE_UP, "mlp.experts.gate_up_proj_bias", ROWS, PAIRED_ROWS),
        expert("linear_fc2.weight", "hidden expert_ffn", _DOWN_PROJ, COLUMNS, TRANSPOSED),
        expert("linear_fc2.bias", "hidden", "mlp.experts.down_proj_bias"),
    ),
    fields=_gpt_oss,
    allowed={
        "hidden_act": (None, "silu"),  # it is not read: the experts' activation is fixed
        "attention_bias": (None, True),
        "swiglu_alpha": (None, 1.702),  # Megatron's quick GELU has no other
    },
    ignored=frozenset({"layer_types"}),
    defaults={
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "moe_intermediate_size": 1,  # it has the name intermediate_size here
        "head_dim": 64,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
    },
    models="gpt-oss-20b, 120b (bfloat16 and MXFP4)",
)

FAMILIES = (GPT_OSS,)
