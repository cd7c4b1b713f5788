"""The floating-point operations of a model, from its shape. No torch here."""

from __future__ import annotations

from slime_convert.shape import ModelShape
from slime_core.flops import FlopsModel


def flops_model(shape: ModelShape) -> FlopsModel:
    """The operations of a model; formula and sources as in :class:`slime_core.flops.FlopsModel`.

    Of a layer with experts those count that a token goes through, as one MLP, and the router. Prediction modules are
    not run and not counted.
    """
    layers = range(shape.num_layers)
    experts = (shape.moe_router_topk or 0) * (shape.moe_ffn_hidden_size or 0)
    visited = experts + (shape.moe_shared_expert_intermediate_size or 0)
    routers = sum(shape.has_layer("experts", layer) for layer in layers)
    widths = [visited if shape.has_layer("experts", layer) else shape.ffn_hidden_size for layer in layers]
    width, rest = divmod(sum(widths), shape.num_layers)
    unrotated, rotary = shape.qk_head_dim or 0, shape.qk_pos_emb_head_dim or 0
    return FlopsModel(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=width,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        head_dim=unrotated + rotary if shape.multi_latent_attention else shape.kv_channels,
        vocab_size=shape.vocab_size,
        further_weights=shape.hidden_size * (3 * rest + routers * (shape.num_experts or 0)),
        value_dim=shape.v_head_dim,
        latent_dim=shape.kv_lora_rank,
        rotary_dim=rotary,
        query_latent_dim=shape.q_lora_rank,
    )
