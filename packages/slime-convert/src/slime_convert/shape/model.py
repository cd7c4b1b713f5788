"""`ModelShape`: what ``config.json``, Megatron's shape flags and the weight mapping agree on. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.shape.families import FAMILIES, unknown_family
from slime_convert.shape.flags import shape_flag_words
from slime_convert.shape.hf_config import shape_fields


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder's shape, under Megatron's argument names.

    Attributes:
        family: Hugging Face ``model_type``; picks the weight mapping. One of :data:`FAMILIES`.
        num_layers: Transformer layers.
        hidden_size: Channels of the residual stream.
        ffn_hidden_size: Channels between the MLP's two projections.
        num_attention_heads: Query heads.
        num_query_groups: Key-value heads; equal to ``num_attention_heads`` without grouped-query attention.
        kv_channels: Channels of one head.
        vocab_size: Rows of the embedding in the Hugging Face model, before any padding.
        max_position_embeddings: Longest context, in tokens.
        rotary_base: Base of the rotary embedding's wavelengths (RoPE theta).
        rotary_percent: Rotated part of a head's channels, its first ones.
        rotary_interleaved: The rotary embedding pairs neighbouring channels, not those half the rotated part apart.
        norm_epsilon: Term added to the mean square in RMSNorm.
        qk_layernorm: Queries and keys pass an RMSNorm per head.
        add_qkv_bias: The query, key and value projections have biases.
        post_self_attn_layernorm: Attention's output passes an RMSNorm before it joins the residual stream.
        post_mlp_layernorm: The MLP's output passes an RMSNorm before it joins the residual stream.
        untie_embeddings_and_output_weights: The output layer has weights of its own.
        use_rope_scaling: Llama 3.x scaling of the low rotary frequencies; the four fields below then count.
        rope_scaling_factor: By how much the low frequencies are divided.
        rope_low_freq_factor: Wavelengths above original context / this factor are divided in full.
        rope_high_freq_factor: Wavelengths below original context / this factor are left alone.
        rope_original_max_position_embeddings: Context length before scaling, in tokens.
        num_experts: Experts of a layer; ``None`` in a dense model, for which the fields below do not count.
        moe_ffn_hidden_size: Channels between an expert's two projections.
        moe_router_topk: Experts per token.
        moe_router_pre_softmax: The router's probabilities are those among all experts, not among the chosen ones.
        num_dense_layers: Leading layers with an MLP instead of experts.
        moe_shared_expert_intermediate_size: Channels of the expert that every token passes; ``None`` without one.
        moe_router_score_function: ``softmax`` or ``sigmoid``.
        moe_router_enable_expert_bias: A bias is added to the experts' scores when the best are chosen.
        moe_router_topk_scaling_factor: Factor on the chosen experts' weights.
        moe_router_num_groups: Groups of experts of which the best few are chosen first; ``None`` or 1 for no groups.
        moe_router_group_topk: Groups that are chosen.
        mtp_num_layers: Modules that predict a further token each, after the layers.
        multi_latent_attention: Queries, keys and values are made from low-rank latents; ``kv_channels`` and
            ``num_query_groups`` do not count then, the fields below do.
        q_lora_rank: Channels of the queries' latent; ``None`` where queries are made directly.
        kv_lora_rank: Channels of the latent of keys and values.
        qk_head_dim: Channels of a query or key head without rotary position.
        qk_pos_emb_head_dim: Channels of a query or key head with rotary position.
        v_head_dim: Channels of a value head.
        rope_type: ``rope``, or ``yarn``, for which the fields below count.
        rotary_scaling_factor: YaRN's factor on the context length.
        original_max_position_embeddings: Context length before scaling, in tokens.
        beta_fast: Rotations within that length above which frequencies are left alone.
        beta_slow: Rotations within that length below which frequencies are divided in full.
        mscale: Coefficient of the logarithm in the factor on rotated channels.
        mscale_all_dim: Coefficient of the logarithm in the factor on the attention's scores.

    Raises:
        UnsupportedModelError: Unknown family.
        HfConfigError: A size is not positive, or the query heads do not divide over the groups.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    norm_epsilon: float = 1e-6
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    post_self_attn_layernorm: bool = False
    post_mlp_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 8192
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int | None = None
    moe_router_pre_softmax: bool = False
    num_dense_layers: int = 0
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    mtp_num_layers: int = 0
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    rope_type: str = "rope"
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnsupportedModelError(unknown_family(self.family, "this ModelShape"))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == 0 and field.name in ("num_dense_layers", "mtp_num_layers", "mscale", "mscale_all_dim"):
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise HfConfigError(f"{field.name} {value} must be positive and finite; correct the model's config")
        if self.num_attention_heads % self.num_query_groups:
            raise HfConfigError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_query_groups "
                f"{self.num_query_groups}; correct the model's config"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        sizes = {name: getattr(self, name) for name in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk")}
        if len({value is None for value in sizes.values()}) > 1:
            raise HfConfigError(f"{sizes} go together; give all three or none")
        if self.num_experts and self.moe_router_topk and self.moe_router_topk > self.num_experts:
            raise HfConfigError(
                f"moe_router_topk {self.moe_router_topk} must be at most num_experts {self.num_experts}; "
                "correct the model's config"
            )

    @classmethod
    def from_hf_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape that a Hugging Face config describes.

        Args:
            source: A model directory, a ``config.json``, or the config as a mapping. Both places of the rotary
                settings are understood: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling``.
                A quantized model has the shape of the same model unquantized.

        Returns:
            The shape.

        Raises:
            HfConfigError: There is no ``config.json``, it is no JSON object, or a key is missing or of a wrong type.
            UnsupportedModelError: The model type, or one of its settings, is not supported.
            QuantizationError: The weights are quantized in a way that is not read.
        """
        return cls(**shape_fields(source))

    def to_megatron_flags(self) -> list[str]:
        """The flags that give Megatron this shape, as words of a command line (values follow their flags)."""
        return shape_flag_words(self)

    def to_megatron_args(self) -> dict[str, Any]:
        """The arguments that a Megatron checkpoint of this shape records, by Megatron's names, as plain values.

        Megatron has no name for the family: ``hf_model_type`` is none of its arguments.
        """
        names = (
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size "
            "max_position_embeddings rotary_base rotary_percent rotary_interleaved norm_epsilon qk_layernorm "
            "add_qkv_bias post_self_attn_layernorm post_mlp_layernorm untie_embeddings_and_output_weights "
            "use_rope_scaling rope_scaling_factor"
        )
        fixed = {
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "group_query_attention": self.num_query_groups < self.num_attention_heads,
        }
        if self.num_experts is not None:
            names += (
                " num_experts moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_router_score_function "
                "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups "
                "moe_router_group_topk moe_shared_expert_intermediate_size moe_layer_freq mtp_num_layers"
            )
        if self.multi_latent_attention:
            names += (
                " multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
                "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
            )
        return {"hf_model_type": self.family, **{name: getattr(self, name) for name in names.split()}, **fixed}

    @property
    def moe_layer_freq(self) -> int | list[int]:
        """Megatron's way to say which layers have experts: 1 for all, or a 0 or 1 for each."""
        dense = self.num_dense_layers
        return [0] * dense + [1] * (self.num_layers - dense) if dense else 1

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a router and experts. Prediction modules count as further layers."""
        return self.num_experts is not None and layer >= self.num_dense_layers

    def padded_vocab_size(self, tensor_parallel: int, divisible_by: int = 128) -> int:
        """Rows of the embedding in Megatron: the vocabulary rounded up to ``divisible_by`` × ``tensor_parallel``."""
        multiple = divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple
