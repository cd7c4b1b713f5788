"""From a model's shape to a Megatron model that takes packed batches and returns log-probs, without holding logits.

Notation: T packed tokens, D hidden channels, N targets, V the rank's part of the (padded) vocabulary, E half the
    rotated channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime_convert.shape import ModelShape
from slime_core.ops import linear_log_probs_and_entropy
from slime_megatron.attention import LayoutParams, PackedAttention
from slime_megatron.config import MegatronConfig
from slime_megatron.device import Device
from slime_megatron.packing import PackedBatch


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A decoder-only model that takes a :class:`PackedBatch` and returns the log-probs of its targets.

    Token ids from ``true_vocab_size`` on are padding. ``kwargs`` are what :class:`GPTModel` takes.
    """

    def __init__(self, *, inverse_frequencies_E: torch.Tensor, true_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(position_embedding_type="none", **kwargs)
        self.inverse_frequencies_E = inverse_frequencies_E
        self.true_vocab_size = true_vocab_size

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, which may be those of the embedding."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def forward(
        self, batch: PackedBatch, *, temperature: float, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs (nats) of the targets [N], and entropies [N] if wanted; the same on all tensor-parallel ranks."""
        group = self.pg_collection.tp
        return linear_log_probs_and_entropy(
            self.hidden_states(batch),
            self.output_weight,
            batch.targets_N,
            temperature=temperature,
            group=group if group.size() > 1 else None,
            vocab_size=self.true_vocab_size,
            with_entropy=with_entropy,
        )

    def hidden_states(self, batch: PackedBatch) -> torch.Tensor:
        """The hidden states that predict the targets, N × D."""
        hidden_T1D = self.embedding(input_ids=batch.tokens_T[None], position_ids=None)
        hidden_T1D = self.decoder(
            hidden_states=hidden_T1D,
            attention_mask=None,
            rotary_pos_emb=self._rotary(batch.positions_T),
            packed_seq_params=LayoutParams(qkv_format="sbhd", layout=batch.attention),
        )
        if self.config.sequence_parallel:
            # The log-probs' gradient is already that of the whole vocabulary, so it is split here and not summed.
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_T1D, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden_ND: torch.Tensor = hidden_T1D.squeeze(1).index_select(0, batch.logit_rows_N)
        return hidden_ND

    def _rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotary angles of every token, T × 1 × 1 × 2E."""
        angles_TE = torch.outer(positions_T.float(), self.inverse_frequencies_E.to(positions_T.device))
        if self.config.rotary_interleaved:
            return angles_TE.repeat_interleave(2, dim=-1)[:, None, None, :]
        return torch.cat([angles_TE, angles_TE], dim=-1)[:, None, None, :]


class RMSNorm(torch.nn.RMSNorm):
    """x / √(mean(x²) + eps) · weight (Zhang and Sennrich, 2019, equation 4).

    Megatron-core's own wrapper refuses sequence parallelism; all that is missing there is the tag by which the
    weight's gradient is summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """A layer whose attention and MLP outputs are normalised before they join the residual stream."""

    def __init__(
        self, config: Any, *args: Any, after_attention: bool = True, after_mlp: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.self_attn_bda: Callable[..., Any]
        self.mlp_bda: Callable[..., Any]
        if after_attention:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attn_bda = _normalised(self.self_attn_bda, self.post_self_attn_layernorm)
        if after_mlp:
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.mlp_bda = _normalised(self.mlp_bda, self.post_mlp_layernorm)


def _normalised(make_bda: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """Megatron's maker of the function that adds bias, dropout and residual, with ``norm`` on what is added."""

    def make(*args: Any) -> Callable[..., Any]:
        add = make_bda(*args)

        def normalise_and_add(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> Any:
            # The linear layers of these models have no biases.
            output, bias = output_with_bias
            return add((norm(output), bias), residual, dropout)

        return normalise_and_add

    return make


def build_model(shape: ModelShape, config: MegatronConfig, device: Device, *, random_weights: bool = True) -> PackedGPT:
    """A model, split over the tensor-parallel ranks.

    Args:
        shape: The model.
        config: The parallel layout and the precision.
        device: Where it lives.
        random_weights: Without, matrices are zero until weights are loaded, and the vocabulary's padding stays so.

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


def rotary_frequencies(shape: ModelShape) -> torch.Tensor:
    """Radians per position of each pair of channels.

    The frequency of pair e is base^(−e/E) (Su et al., 2021, section 3.2.2). Llama 3.1's scaling divides it by
    ``rope_scaling_factor`` where the wavelength exceeds the original context over ``rope_low_freq_factor``, leaves
    it alone below the original context over ``rope_high_freq_factor``, and goes over linearly in between.

    Returns:
        Frequencies of shape E, fp32 on the CPU.
    """
    channels = int(shape.kv_channels * shape.rotary_percent)
    frequencies_E = 1.0 / shape.rotary_base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    if not shape.use_rope_scaling:
        return frequencies_E
    context = shape.rope_original_max_position_embeddings
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    wavelengths_E = 2 * math.pi / frequencies_E
    kept_E = ((context / wavelengths_E - low) / (high - low)).clamp(0, 1)
    return frequencies_E * (kept_E + (1 - kept_E) / shape.rope_scaling_factor)
