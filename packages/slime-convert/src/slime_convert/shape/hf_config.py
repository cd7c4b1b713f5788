"""Reading the shape out of a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.quantize.formats import format_of
from slime_convert.shape.config_values import integer, number, texts
from slime_convert.shape.families import FAMILIES, Family, unknown_family
from slime_convert.shape.rope import rope_settings


def shape_fields(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`ModelShape` that a config describes.

    Args:
        source: A model directory, a ``config.json``, or the config as a mapping.

    Raises:
        HfConfigError: There is no ``config.json``, it is no JSON object, or a key is missing or of a wrong type.
        UnsupportedModelError: The model type, or one of its settings, is not supported.
        QuantizationError: The weights are quantized in a way that is not read.
    """
    config, where = read_config(source)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(unknown_family(model_type, where))
    family = FAMILIES[model_type]
    _refuse_unsupported(config, family, where)
    format_of(config, where)  # refuses what cannot be expanded; how the weights are stored does not change the shape
    heads = integer(config, "num_attention_heads", where)
    hidden_size = integer(config, "hidden_size", where)
    return {
        "family": model_type,
        "num_layers": integer(config, "num_hidden_layers", where),
        "hidden_size": hidden_size,
        "ffn_hidden_size": integer(config, "intermediate_size", where),
        "num_attention_heads": heads,
        "num_query_groups": integer(config, "num_key_value_heads", where, default=heads),
        "kv_channels": integer(config, "head_dim", where, default=family.head_dim or hidden_size // max(heads, 1)),
        "vocab_size": integer(config, "vocab_size", where),
        "max_position_embeddings": integer(config, "max_position_embeddings", where),
        "norm_epsilon": number(config, "rms_norm_eps", where, default=family.norm_epsilon),
        "qk_layernorm": bool(config.get("use_qk_norm")) if family.reads_qk_norm else family.qk_layernorm,
        "add_qkv_bias": _qkv_bias(config, family),
        "post_self_attn_layernorm": family.post_norms,
        "post_mlp_layernorm": family.post_norms,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        **rope_settings(config, family, where),
        **(_expert_settings(config, where) if family.experts else {}),
        **(_sigmoid_router_settings(config, where) if family.sigmoid_router else {}),
        **(_latent_attention_settings(config, where) if family.latent_attention else {}),
    }


def read_config(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The config as a mapping, and how to name it in a message.

    Raises:
        HfConfigError: It cannot be read, or is no JSON object.
    """
    if isinstance(source, Mapping):
        return source, "the given config"
    path = Path(source)
    path = path if path.suffix == ".json" else path / "config.json"
    advice = "give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HfConfigError(f"cannot read {path} ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise HfConfigError(f"{path} is no valid JSON ({error}); {advice}") from error
    if not isinstance(config, dict):
        raise HfConfigError(f"{path} holds a JSON {type(config).__name__}, not an object; {advice}")
    return config, str(path)


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Settings of the supported families that change the model in ways that the mapping does not carry."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False, True) if family.reads_attention_bias else (None, False),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    }
    if family.experts:
        allowed |= {"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])}
    if family.sigmoid_router:
        allowed |= {
            "norm_topk_prob": (True,),  # without it DeepSeek's own code and transformers do not do the same
            "scoring_func": (None, "sigmoid"),
            "topk_method": (None, "noaux_tc"),
            "moe_layer_freq": (None, 1),
        }
    if family.latent_attention:
        allowed |= {"rope_interleave": (None, True), "rope_interleaved": (None, True)}
    for key, values in allowed.items():
        if config.get(key) not in values:
            shown = ", ".join(json.dumps(value) for value in values if value is not None) or "none"
            raise UnsupportedModelError(
                f"{key} {json.dumps(config.get(key))} of {where} is not supported; allowed: {shown}; "
                "convert a model without it"
            )
    kinds = set(texts(config, "layer_types", where) or ())
    if kinds - {"full_attention"}:
        raise UnsupportedModelError(
            f"layer_types {', '.join(sorted(kinds))} of {where} are not supported; allowed: full_attention; "
            "convert a model without others"
        )


def _qkv_bias(config: Mapping[str, Any], family: Family) -> bool:
    given = config.get("attention_bias") if family.reads_attention_bias else None
    return family.qkv_bias if given is None else bool(given)


def _first(config: Mapping[str, Any], *keys: str) -> str:
    """The first of some names that a config has; transformers 5 renames some keys when it saves a config."""
    return next((key for key in keys if key in config), keys[0])


def _expert_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields about experts and router."""
    return {
        "num_experts": integer(config, _first(config, "num_experts", "n_routed_experts", "num_local_experts"), where),
        "moe_ffn_hidden_size": integer(config, "moe_intermediate_size", where),
        "moe_router_topk": integer(config, "num_experts_per_tok", where),
        # Megatron's softmax over the chosen logits is the softmax over all, normalised to the chosen ones.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def _sigmoid_router_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    groups, chosen, topk = (integer(config, key, where) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    if topk == 1:
        raise UnsupportedModelError(
            f"num_experts_per_tok 1 of {where} is not supported; allowed: 2 or more (Megatron does not normalise the "
            "weight of a single expert, the model does); convert another model"
        )
    if groups > 1 and topk != 2 * chosen:
        raise UnsupportedModelError(
            f"num_experts_per_tok {topk} with topk_group {chosen} of {where} is not supported; allowed: twice as many "
            "experts as groups (Megatron scores a group by its best topk / topk_group experts, the model by its best "
            "two); convert another model"
        )
    shared = integer(config, "n_shared_experts", where, default=0)
    return {
        # What the chosen weights are divided by does not depend on it, but Megatron's command lines have it.
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": number(config, "routed_scaling_factor", where),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_shared_expert_intermediate_size": shared * integer(config, "moe_intermediate_size", where) or None,
        "num_dense_layers": _dense_layers(config, where),
        "mtp_num_layers": integer(
            config, _first(config, "num_nextn_predict_layers", "num_mtp_layers"), where, default=0
        ),
    }


def _dense_layers(config: Mapping[str, Any], where: str) -> int:
    kinds = texts(config, "mlp_layer_types", where)
    if kinds is None:
        return integer(config, "first_k_dense_replace", where)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise UnsupportedModelError(
            f"mlp_layer_types of {where} has dense layers behind sparse ones, which is not supported; "
            "allowed: dense layers first; convert another model"
        )
    layers = integer(config, "num_hidden_layers", where)
    if len(kinds) != layers or config.get("first_k_dense_replace") not in (None, dense):
        raise HfConfigError(
            f"mlp_layer_types of {where} has {dense} dense of {len(kinds)} layers, num_hidden_layers is {layers} and "
            f"first_k_dense_replace {config.get('first_k_dense_replace')}; use the model's original config"
        )
    return dense


def _latent_attention_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    heads = integer(config, "num_attention_heads", where)
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": heads,
        "kv_channels": max(integer(config, "hidden_size", where) // max(heads, 1), 1),
        "q_lora_rank": None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank", where),
        "kv_lora_rank": integer(config, "kv_lora_rank", where),
        "qk_head_dim": integer(config, "qk_nope_head_dim", where),
        "qk_pos_emb_head_dim": integer(config, "qk_rope_head_dim", where),
        "v_head_dim": integer(config, "v_head_dim", where),
    }
