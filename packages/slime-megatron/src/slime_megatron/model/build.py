"""From a model's shape to a Megatron model."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime_convert.shape import ModelShape
from slime_megatron.config import MegatronConfig
from slime_megatron.device import Device
from slime_megatron.model.attention import PackedAttention
from slime_megatron.model.gpt import PackedGPT
from slime_megatron.model.layer import PostNormLayer
from slime_megatron.model.norm import RMSNorm
from slime_megatron.model.rotary import rotary_frequencies


def build_model(shape: ModelShape, config: MegatronConfig, device: Device, *, random_weights: bool = True) -> PackedGPT:
    """A model, split over the tensor-parallel ranks.

    Args:
        shape: The model.
        config: The parallel layout and the precision.
        device: Where it lives.
        random_weights: Draw random weights. Without, matrices are zero: weights are to be loaded (and the vocabulary's
            padding, which a checkpoint need not have, stays zero).

    Raises:
        ConfigError: The heads or the MLP do not divide over the tensor-parallel ranks.
    """
    config.check_fits(shape)
    transformer = transformer_config(shape, config, device)
    if not random_weights:
        for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
            setattr(transformer, name, torch.nn.init.zeros_)
    layer = _layer_spec(shape)
    return PackedGPT(
        inverse_frequencies_E=rotary_frequencies(shape),
        true_vocab_size=shape.vocab_size,
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, layer_norm=RMSNorm),
        vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
    )


def transformer_config(shape: ModelShape, config: MegatronConfig, device: Device) -> TransformerConfig:
    """Megatron's configuration of the model and of its parallel layout."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.add_qkv_bias,
        rotary_interleaved=shape.rotary_interleaved,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=config.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        sequence_parallel=config.splits_sequences,
        recompute_granularity=config.recompute,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        use_cpu_initialization=device.is_cpu,
        gradient_accumulation_fusion=False,
    )


def _layer_spec(shape: ModelShape) -> Any:
    """Megatron's own layer, with our core attention and norms."""
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    if shape.post_self_attn_layernorm or shape.post_mlp_layernorm:
        spec.module = PostNormLayer
        spec.params = {"after_attention": shape.post_self_attn_layernorm, "after_mlp": shape.post_mlp_layernorm}
    return spec
