"""DeepSeek V3 and what has its attention and router: Kimi-K2, Moonlight, GLM-4.7-Flash; sparse: V3.2 and GLM-5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_convert.families.config import HfConfig, layer_freq, rope_fields
from slime_convert.families.family import (
    COLUMNS,
    EXPERTS,
    MLP,
    ROWS,
    Family,
    WeightRule,
    also,
    mlp_or_experts,
    mtp_rules,
    norm,
    shared_expert,
    weight,
)
from slime_convert.families.layouts import indexer_rows

_A = "self_attention."


def _both_names(rule: WeightRule) -> WeightRule:
    """A norm that Transformer Engine fuses, in a layer whose local form keeps the norm's own name on disk."""
    return replace(rule, stored_as=tuple(filter(None, (rule.te_name, rule.megatron))))


# The projections to the latents are whole on every rank in Transformer Engine's layers.
LATENT_ATTENTION: tuple[WeightRule, ...] = (
    norm("input_layernorm", "input_layernorm"),
    weight(f"{_A}linear_q_proj.weight", "latent_query hidden", "self_attn.q_proj.weight", ROWS, when="!q_lora_rank"),
    *also(
        (
            weight(f"{_A}linear_q_down_proj.weight", "q_latent hidden", "self_attn.q_a_proj.weight"),
            _both_names(norm(f"{_A}q_layernorm", "self_attn.q_a_layernorm", "q_latent", f"{_A}linear_q_up_proj")),
            weight(f"{_A}linear_q_up_proj.weight", "latent_query q_latent", "self_attn.q_b_proj.weight", ROWS),
        ),
        when="q_lora_rank",
    ),
    weight(f"{_A}linear_kv_down_proj.weight", "kv_latent+rotated hidden", "self_attn.kv_a_proj_with_mqa.weight"),
    _both_names(norm(f"{_A}kv_layernorm", "self_attn.kv_a_layernorm", "kv_latent", f"{_A}linear_kv_up_proj")),
    weight(f"{_A}linear_kv_up_proj.weight", "latent_key_value kv_latent", "self_attn.kv_b_proj.weight", ROWS),
    weight(f"{_A}linear_proj.weight", "hidden latent_value", "self_attn.o_proj.weight", COLUMNS),
)
ROUTER_BIAS = weight("mlp.router.expert_bias", "experts", "mlp.gate.e_score_correction_bias")
SIGMOID_EXPERTS: tuple[WeightRule, ...] = (*EXPERTS, ROUTER_BIAS, *shared_expert("mlp.shared_experts"))
# In latent attention's layers the norm before the router has one name only, that before an MLP two.
_LATENT_MLPS = mlp_or_experts(
    (*also(SIGMOID_EXPERTS[:1], stored_as=()), *SIGMOID_EXPERTS[1:]), mlp=(_both_names(MLP[0]), *MLP[1:])
)

MTP = mtp_rules("model.layers.{i}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
MTP_COPIES = ("model.layers.{i}.embed_tokens.weight", "model.layers.{i}.shared_head.head.weight")

SIGMOID_ALLOWED: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "norm_topk_prob": (True,),  # without it DeepSeek's own code and transformers do not do the same
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}
_LATENT_ALLOWED = SIGMOID_ALLOWED | dict.fromkeys(("rope_interleave", "rope_interleaved"), (None, True))


def sigmoid_router_fields(config: HfConfig) -> dict[str, Any]:
    """The fields about experts and a router that scores them by sigmoids with a bias.

    Settings with which Megatron would choose other experts, or weigh them otherwise, are refused.
    """
    groups, chosen, topk = (config.integer(key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    if topk == 1:
        allowed = "2 or more (Megatron does not normalise the weight of a single expert, the model does)"
        raise config.refuse("num_experts_per_tok 1", allowed)
    if groups > 1 and topk != 2 * chosen:
        allowed = "twice as many (Megatron scores a group by its best topk / topk_group experts, models by two)"
        raise config.refuse(f"num_experts_per_tok {topk} with topk_group {chosen}", allowed)
    width = config.integer("moe_intermediate_size")
    return {
        "num_experts": config.integer(config.first("num_experts", "n_routed_experts", "num_local_experts")),
        "moe_ffn_hidden_size": width,
        "moe_router_topk": topk,
        # What the chosen weights are divided by does not depend on it, but Megatron's command lines have it.
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor"),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_shared_expert_intermediate_size": (config.nullable("n_shared_experts") or 0) * width or None,
        "moe_layer_freq": _layers_with_experts(config),
        "mtp_num_layers": config.integer(config.first("num_nextn_predict_layers", "num_mtp_layers"), 0),
    }


def _layers_with_experts(config: HfConfig) -> tuple[int, ...] | int:
    layers, kinds = config.layers, config.layers_of("mlp_layer_types", {"dense": 0, "sparse": 1})
    dense = config.integer("first_k_dense_replace", None if kinds is None else kinds.count(0))
    if not 0 <= dense <= layers:
        raise config.wrong("first_k_dense_replace", f"is {dense}, and num_hidden_layers {layers}")
    wanted = [0] * dense + [1] * (layers - dense)
    if kinds is not None and list(kinds) != wanted:
        if config.get("first_k_dense_replace") is None:
            raise config.refuse("mlp_layer_types with dense layers behind sparse ones", "dense layers first")
        says = f"has {kinds.count(0)} dense of {layers} layers, and first_k_dense_replace is {dense}"
        raise config.wrong("mlp_layer_types", says)
    return layer_freq(wanted)


def latent_attention_fields(config: HfConfig) -> dict[str, Any]:
    """The fields about multi-latent attention."""
    heads = config.integer("num_attention_heads")
    rope = rope_fields(config, ("default", "yarn"))
    if not rope.get("yarn_rounds_range", True):
        raise config.refuse("truncate false in the yarn rope scaling", "true, which Megatron always does")
    return {
        **rope,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": heads,
        "kv_channels": max(config.integer("hidden_size") // max(heads, 1), 1),
        "q_lora_rank": config.nullable("q_lora_rank"),
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "qk_head_dim": config.integer("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.integer("qk_rope_head_dim"),
        "v_head_dim": config.integer("v_head_dim"),
    }


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    layer=(*LATENT_ATTENTION, *_LATENT_MLPS),
    fields=lambda config: sigmoid_router_fields(config) | latent_attention_fields(config),
    allowed=_LATENT_ALLOWED,
    defaults={"n_shared_experts": 1, "q_lora_rank": 1536},
    mtp=MTP,
    mtp_copies=MTP_COPIES,
    lacks="values of another width than keys in core attention without Transformer Engine",
    models="DeepSeek V3, V3.1, R1, Moonlight",
)
KIMI_K2 = DEEPSEEK_V3.named("kimi_k2", models="Kimi-K2")
GLM4_MOE_LITE = DEEPSEEK_V3.named(
    "glm4_moe_lite", defaults={"n_shared_experts": 1, "q_lora_rank": 768, "rms_norm_eps": 1e-5}, models="GLM-4.7-Flash"
)


def _indexer(*, pairs: bool) -> tuple[WeightRule, ...]:
    """The weights of sparse attention's indexer, under the names and in the order of megatron-core 0.16 to 0.18."""
    megatron, hf = f"{_A}core_attention.indexer.", "self_attn.indexer."
    per_head, one_head = indexer_rows("index_heads", pairs=pairs), indexer_rows(None, pairs=pairs)
    return (
        weight(f"{megatron}linear_wq_b.weight", "index_query q_latent", f"{hf}wq_b.weight", layout=per_head),
        weight(f"{megatron}linear_wk.weight", "index_head hidden", f"{hf}wk.weight", layout=one_head),
        weight(f"{megatron}k_norm.weight", "index_head", f"{hf}k_norm.weight", layout=one_head),
        weight(f"{megatron}k_norm.bias", "index_head", f"{hf}k_norm.bias", layout=one_head),
        weight(f"{megatron}linear_weights_proj.weight", "index_heads hidden", f"{hf}weights_proj.weight"),
    )


def _sparse_attention(config: HfConfig) -> dict[str, Any]:
    config.layers_of("layer_types", dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), 0))
    kinds = config.layers_of("indexer_types", {"full": 0, "shared": 1})
    pattern = str(config.get("index_topk_pattern") or "")
    if any(kinds or ()) or (kinds is None and (config.integer("index_topk_freq", 1) != 1 or "S" in pattern)):
        allowed = "one in each layer (megatron-core shares none before 0.19)"
        raise config.refuse("an indexer that several layers share", allowed)
    if config.nullable("q_lora_rank") is None:
        raise config.refuse("q_lora_rank null", "a number")
    fields = sigmoid_router_fields(config) | latent_attention_fields(config)
    width = config.integer("index_head_dim", 128)
    if width <= fields["qk_pos_emb_head_dim"] or width & (width - 1):
        raise config.refuse(f"index_head_dim {width}", "a power of two above qk_rope_head_dim")
    return fields | {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": config.integer("index_n_heads"),
        "dsa_indexer_head_dim": width,
        "dsa_indexer_topk": config.integer("index_topk", 2048),
    }


def _sparse(model_type: str, defaults: Mapping[str, Any], *, pairs: bool, models: str) -> Family:
    return DEEPSEEK_V3.named(
        model_type,
        layer=(*LATENT_ATTENTION, *_indexer(pairs=pairs), *_LATENT_MLPS),
        fields=_sparse_attention,
        allowed=_LATENT_ALLOWED | {"indexer_rope_interleave": (None, pairs), "index_kpool": (None,)},
        ignored=frozenset({"layer_types"}),
        defaults={**DEEPSEEK_V3.defaults, **defaults},
        lacks="a spec for sparse attention on local layers, whole linear layers without Transformer Engine, a Hadamard "
        "rotation of other types than bfloat16, the epsilon of the indexer's key norm; its order of rows is another "
        "from core 0.19 on",
        models=models,
    )


DEEPSEEK_V32 = _sparse("deepseek_v32", {"index_n_heads": 64}, pairs=False, models="DeepSeek V3.2")
GLM_MOE_DSA = _sparse(
    "glm_moe_dsa", {"rms_norm_eps": 1e-5, "index_n_heads": 32, "q_lora_rank": 2048}, pairs=True, models="GLM-5, GLM-5.1"
)

FAMILIES = (DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE, DEEPSEEK_V32, GLM_MOE_DSA)
