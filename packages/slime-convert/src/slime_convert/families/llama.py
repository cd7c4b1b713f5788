"""Llama and what shares its layers: SmolLM2, Mistral, and Mixtral with experts."""

from __future__ import annotations

from typing import Any

from slime_convert.families.config import HfConfig, rope_fields
from slime_convert.families.family import ATTENTION, EXPERTS_NORM, MLP, Family, experts, weight

LLAMA = Family(model_type="llama", layer=(*ATTENTION, *MLP), models="Llama 2, 3 to 3.3, SmolLM2")


def _window(config: HfConfig) -> dict[str, Any]:
    """The window of all layers: Megatron counts earlier tokens only (``get_sliding_window_causal_mask``)."""
    window = config.nullable("sliding_window")
    if window is None or window >= config.integer("max_position_embeddings"):
        return {}
    return {"window_size": window - 1}


MISTRAL = LLAMA.named(
    "mistral",
    fields=lambda config: rope_fields(config, ("default",)) | _window(config),
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    models="Mistral 7B, Nemo, Small (text)",
)


def _mixtral(config: HfConfig) -> dict[str, Any]:
    topk = config.integer("num_experts_per_tok")
    if topk == 1:
        raise config.refuse("num_experts_per_tok 1", "2 or more")
    return {
        **rope_fields(config, ("default",)),
        **_window(config),
        "num_experts": config.integer(config.first("num_local_experts", "num_experts")),
        "moe_ffn_hidden_size": config.integer("intermediate_size"),
        "moe_router_topk": topk,
    }


MIXTRAL = Family(
    model_type="mixtral",
    layer=(
        *ATTENTION,
        EXPERTS_NORM,
        weight("mlp.router.weight", "experts hidden", "block_sparse_moe.gate.weight"),
        *experts("block_sparse_moe.experts.{e}.", "w1", "w3", "w2"),
    ),
    fields=_mixtral,
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    models="Mixtral 8x7B, 8x22B",
)

FAMILIES = (LLAMA, MISTRAL, MIXTRAL)
