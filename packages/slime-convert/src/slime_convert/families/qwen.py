"""Qwen2 (2.5 too) and Qwen3, dense and with experts; MiMo, which is Qwen2 with prediction modules; Qwen3-Next."""

from __future__ import annotations

from typing import Any

from slime_convert.families.config import HfConfig, expert_fields, layer_freq, rope_fields
from slime_convert.families.family import (
    ATTENTION,
    COLUMNS,
    EXPERTS,
    LAYER,
    MLP,
    QK_NORM,
    QKV_BIAS,
    ROWS,
    Family,
    also,
    attention,
    mlp_or_experts,
    mtp_rules,
    norm,
    shared_expert,
    weight,
)
from slime_convert.families.layouts import GATED_QKV, LESS_ONE, LINEAR_ATTENTION, SWAPPED_HALVES

QWEN2 = Family(
    model_type="qwen2",
    layer=(*ATTENTION, QKV_BIAS, *MLP),
    fields=lambda _: {"add_qkv_bias": True},
    defaults={"num_key_value_heads": 32},
    models="Qwen2, Qwen2.5",
)
QWEN3 = Family(
    model_type="qwen3",
    layer=(*ATTENTION, *QK_NORM, *MLP),
    fields=lambda _: {"qk_layernorm": True},
    defaults={"head_dim": 128, "num_key_value_heads": 32},
    models="Qwen3",
)


def _layers_with_experts(config: HfConfig) -> tuple[int, ...] | int:
    dense = set(config.list_of(int, "mlp_only_layers") or ())
    sparse = config.every("decoder_sparse_step", 1)
    return layer_freq([int(sparse[layer] and layer not in dense) for layer in range(config.layers)])


def _qwen2_moe(config: HfConfig) -> dict[str, Any]:
    return {
        **expert_fields(config, normalised=False),
        "add_qkv_bias": config.switch("qkv_bias", True),
        "moe_layer_freq": _layers_with_experts(config),
        "moe_shared_expert_intermediate_size": config.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    layer=(*ATTENTION, QKV_BIAS, *mlp_or_experts((*EXPERTS, *shared_expert("mlp.shared_expert")))),
    fields=_qwen2_moe,
    defaults={"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    layer=(*ATTENTION, *QK_NORM, *mlp_or_experts(EXPERTS)),
    fields=lambda config: {
        **expert_fields(config, normalised=False),
        "qk_layernorm": True,
        "moe_layer_freq": _layers_with_experts(config),
    },
    defaults={"num_key_value_heads": 4},
    models="Qwen3-30B-A3B, 235B-A22B",
)

# transformers has no class for MiMo: the names of a module's parts follow the model's own code and SGLang's mimo_mtp.
_MODULE = "model.mtp_layers.{m}."

MIMO = QWEN2.named(
    "mimo",
    fields=lambda config: {"add_qkv_bias": True, "mtp_num_layers": config.integer("num_nextn_predict_layers", 0)},
    # Its code, Qwen2's, has the biases whatever this says; and it never ties the output layer.
    allowed={"attention_bias": (None, True), "use_mrope": (None, False), "tie_word_embeddings": (None, False)},
    mtp=mtp_rules(
        _MODULE, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", layout=SWAPPED_HALVES
    ),
    mtp_layer=_MODULE,
    models="MiMo-7B",
)

_A = "self_attention."
_QKV = "linear_key+linear_key+linear_value"
_QKVZ, _BA = f"{_QKV}+linear_value", "linear_value_heads+linear_value_heads"
# torch_dist checkpoints hold each section of the two under a key of its own (megatron-core's GatedDeltaNet).
_STORED = ("query", "key", "value", "z", "beta", "alpha")

_LINEAR_ATTENTION = (
    norm("input_layernorm", "input_layernorm", fused_into=f"{_A}in_proj"),
    weight(
        f"{_A}in_proj.weight",
        f"{_QKVZ}+{_BA} hidden",
        {"linear_attn.in_proj_qkvz.weight": f"{_QKVZ} hidden", "linear_attn.in_proj_ba.weight": f"{_BA} hidden"},
        ROWS,
        LINEAR_ATTENTION,
        stored_sections=_STORED,
    ),
    weight(f"{_A}conv1d.weight", f"{_QKV} one kernel", "linear_attn.conv1d.weight", ROWS, stored_sections=_STORED[:3]),
    weight(f"{_A}A_log", "linear_value_heads", "linear_attn.A_log", ROWS),
    weight(f"{_A}dt_bias", "linear_value_heads", "linear_attn.dt_bias", ROWS),
    # Megatron's norms are all zero-centred, and this one of Hugging Face's is not.
    weight(
        f"{_A}out_norm.weight",
        "linear_value_head",
        "linear_attn.norm.weight",
        layout=LESS_ONE,
        like=f"{LAYER}{_A}in_proj.weight",
    ),
    weight(f"{_A}out_proj.weight", "hidden linear_value", "linear_attn.out_proj.weight", COLUMNS),
)


def _qwen3_next(config: HfConfig) -> dict[str, Any]:
    linear = config.layers_of("layer_types", {"linear_attention": 1, "full_attention": 0})
    linear = tuple(config.every("full_attention_interval", 4, but=True)) if linear is None else linear
    names = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    sizes = {f"linear_{name}": config.integer(f"linear_{name}") for name in names}
    key_heads, value_heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if min(sizes.values()) < 1 or value_heads % key_heads:
        raise config.refuse(f"linear_num_value_heads {value_heads} with linear_num_key_heads {key_heads}", "a multiple")
    modules = config.integer("num_nextn_predict_layers", 1)
    if modules > 1:
        raise config.refuse(f"num_nextn_predict_layers {modules}", "0 or 1 (the names of its weights have no number)")
    return {
        **rope_fields(config, ("default",), partial=True),
        **expert_fields(config, normalised=True),
        **sizes,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": linear,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "moe_shared_expert_intermediate_size": config.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
        # No key says whether there is a module; vLLM takes one, and it is left out where the files have none.
        "mtp_num_layers": modules,
    }


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    layer=(
        *also(_LINEAR_ATTENTION, layers="linear"),
        *also((*attention(GATED_QKV), *QK_NORM), layers="full"),
        *EXPERTS,
        *shared_expert("mlp.shared_expert"),
    ),
    fields=_qwen3_next,
    allowed={"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])},
    ignored=frozenset({"layer_types"}),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 2,
        **dict.fromkeys(("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"), 512),
        "num_experts_per_tok": 10,
        "intermediate_size": 5632,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    mtp=mtp_rules("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    mtp_layer="mtp.layers.{m}.",
    lacks="a spec for linear attention on local layers, its L2 norm without fla, zero-centred norms without "
    "Transformer Engine",
    models="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
)

FAMILIES = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, MIMO)
