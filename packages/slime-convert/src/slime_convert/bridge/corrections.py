"""What mbridge 0.15.1 says otherwise than the models are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def corrected_settings(config: Any) -> dict[str, Any]:
    """Fields of Megatron's config that mbridge leaves out or sets otherwise than transformers computes the model.

    Args:
        config: The model's Hugging Face config.
    """
    family = config.model_type
    if family == "mixtral":
        # The chosen experts' probabilities sum to one: Megatron's softmax over the chosen logits.
        return {"moe_router_pre_softmax": False}
    if family == "qwen2_moe":
        return {
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_shared_expert_gate": True,
            "add_qkv_bias": config.qkv_bias,
        }
    if family == "qwen3_moe":
        return {"moe_router_pre_softmax": not config.norm_topk_prob}
    if family == "glm4_moe":
        return {
            "add_qkv_bias": bool(config.attention_bias),
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        }
    if family == "deepseek_v3":
        return {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return {}


def has_swapped_halves(family: str, name: str) -> bool:
    """Whether a weight's columns are for (state, embedding) in Hugging Face and (embedding, state) in Megatron.

    MiMo's prediction modules are so (SGLang's ``mimo_mtp``, megatron-core's ``MultiTokenPredictionLayer``).

    Args:
        family: Hugging Face ``model_type``.
        name: Megatron's name.
    """
    return family == "mimo" and name.endswith(".eh_proj.weight")


def swap_halves(tensor: Tensor) -> Tensor:
    """The tensor with the halves of its columns exchanged; its own inverse."""
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
