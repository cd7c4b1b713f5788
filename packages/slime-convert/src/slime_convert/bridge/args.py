"""Megatron's arguments for a model that mbridge describes, and shape flags checked against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_convert.shape import check_flags

_FIELDS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels rotary_interleaved "
    "qk_layernorm add_qkv_bias add_bias_linear normalization mtp_num_layers"
)
_EXPERT_FIELDS = (
    "moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_router_score_function "
    "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq"
)
_LATENT_FIELDS = (
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor "
    "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
)


def megatron_args(config: Any, model_args: Mapping[str, Any], hf_config: Any) -> dict[str, Any]:
    """The arguments that a Megatron checkpoint of the model records, as plain values.

    Args:
        config: Megatron's ``TransformerConfig``.
        model_args: What else Megatron's ``GPTModel`` is made with.
        hf_config: The model's Hugging Face config.
    """
    names = _FIELDS
    latent = hasattr(config, "kv_lora_rank")
    if config.num_moe_experts:
        names += f" {_EXPERT_FIELDS}"
    if latent:
        names += f" {_LATENT_FIELDS}"
    llama3 = hf_config.llama3_rope
    args = {name: getattr(config, name) for name in names.split()} | {
        "hf_model_type": hf_config.model_type,
        "swiglu": True,
        "norm_epsilon": config.layernorm_epsilon,
        "group_query_attention": config.num_query_groups < config.num_attention_heads,
        "num_experts": config.num_moe_experts,
        "vocab_size": hf_config.vocab_size,
        "max_position_embeddings": model_args["max_sequence_length"],
        "position_embedding_type": model_args["position_embedding_type"],
        "rotary_base": float(model_args["rotary_base"]),
        "rotary_percent": model_args.get("rotary_percent", 1.0),
        "rotary_seq_len_interpolation_factor": model_args.get("seq_len_interpolation_factor"),
        "use_rope_scaling": llama3 is not None,
        "rope_scaling_factor": llama3["factor"] if llama3 else None,
        "untie_embeddings_and_output_weights": not getattr(hf_config, "tie_word_embeddings", False),
        "multi_latent_attention": True if latent else None,
    }
    return {name: value for name, value in args.items() if value is not None}


def check_flags_with(args: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Refuse shape flags that contradict a model's arguments.

    Raises:
        ShapeMismatchError: One message with every contradiction.
    """
    shape: Any = _Shape(args)
    check_flags(shape, flags)


class _Shape:
    """Arguments, as if they were the fields of a :class:`slime_convert.ModelShape`."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return self._args.get(name, 1 if name == "moe_layer_freq" else None)

    def has_experts(self, layer: int) -> bool:
        """As :meth:`slime_convert.ModelShape.has_experts`."""
        freq: int | list[int] = self._args["moe_layer_freq"]
        return layer % freq == 0 if isinstance(freq, int) else bool(freq[layer])
