"""The memory that a micro-batch takes on a rank while it is trained on, from shape and settings. No torch here.

Counted is what the backward pass needs again, as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4), without the
scores of attention, which are computed again, and without logits, which are computed in chunks.

Notation: T packed tokens of a context-parallel rank, D hidden channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slime_convert.shape import ModelShape
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import layer_stages

MIB = 2**20
_LOGIT_PART = 10  # the output layer takes this part of the logits at a time, or a little more
_SCORES = 2**20  # of one batched product of attention, per head; three buffers of them, fp32
_CHUNK = 256  # queries of such a product


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes that a rank needs on top of what it holds, at the moment of a step when that is most.

    Attributes:
        layers: Kept by the layers for the backward pass, of all micro-batches in flight.
        working: Of one layer while it is computed: gradients, and what is computed again.
        logits: The output layer's: hidden states, a chunk of logits, the gradient of its weight; a value head's hidden
            states. Last stage only.
    """

    layers: int
    working: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.layers + self.working + self.logits


def activation_memory(
    shape: ModelShape,
    config: MegatronConfig,
    *,
    stage: int = 0,
    tokens: int,
    micro_batches: int = 1,
    fused: bool = False,
    value_head: bool = False,
) -> ActivationMemory:
    """The activations of one pipeline stage.

    Args:
        stage: The stage; the first has most micro-batches in flight, the last has the output layer.
        tokens: Tokens of a micro-batch, over all ranks that share its sequences.
        micro_batches: Micro-batches of an optimizer step on a data-parallel rank.
        fused: Whether activations and attention have fused kernels, as on CUDA in 16 bit.
        value_head: In place of the output layer; there are no logits then.
    """
    own_T = -(-tokens // config.context_parallel_size)
    pipeline, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    in_flight: float = min(pipeline - stage, micro_batches)
    if virtual > 1:  # Megatron's interleaved schedule, Korthikanti et al. section 4.2.3
        in_flight = min(in_flight * (1 + (pipeline - 1) / (pipeline * virtual)), micro_batches)
    layers = [layer for layer, rank in enumerate(layer_stages(config, shape.num_layers)) if rank == stage]
    sizes = [Layer.of(shape, config, layer, fused=fused) for layer in layers]
    width = 2 if config.bf16 else 4
    kept = sum(_kept(sizes, config)) * own_T * width * in_flight
    working = max((size.all for size in sizes), default=0.0) * own_T * width
    if not fused:
        heads = math.ceil(shape.num_attention_heads / config.tensor_model_parallel_size)
        working += 3 * 4 * heads * min(_SCORES, _CHUNK * own_T)
    logits = _logits(shape, config, own_T, width, value_head=value_head) if stage == pipeline - 1 else 0
    return ActivationMemory(round(kept), round(working), logits)


@dataclass(frozen=True)
class Layer:
    """Numbers per token that a layer keeps: its input, attention's, and those of the MLP or the experts."""

    input: float
    attention: float
    mlp: float

    @property
    def all(self) -> float:
        """Without recomputation."""
        return self.input + self.attention + self.mlp

    @classmethod
    def of(cls, shape: ModelShape, config: MegatronConfig, layer: int, *, fused: bool) -> Layer:
        """A layer's numbers. Experts count as if they were loaded evenly."""
        tensor = config.tensor_model_parallel_size
        rows = tensor if config.splits_sequences else 1
        hidden = shape.hidden_size / rows
        attention = hidden * (1 + shape.post_self_attn_layernorm) + _attention(shape, fused) / tensor
        # Of a gated activation: both halves and their product; without a fused kernel also the steps in between.
        gated = 3 if fused else 5
        if config.lora is not None:  # what adapters give is held next to the layers' own outputs, as measured
            attention += hidden + (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels / tensor
        if not shape.has_layer("experts", layer):
            mlp = hidden * (2 + shape.post_mlp_layernorm) + gated * shape.ffn_hidden_size / tensor
            mlp += 0 if config.lora is None else hidden + 2 * shape.ffn_hidden_size / tensor
            return cls(hidden, attention, mlp)
        topk, experts = shape.moe_router_topk or 0, shape.num_experts or 0
        spread = config.expert_tensor_size if rows > 1 else 1
        visited = topk / rows * (2 * shape.hidden_size * spread + gated * (shape.moe_ffn_hidden_size or 0))
        shared = gated * (shape.moe_shared_expert_intermediate_size or 0) / tensor
        return cls(hidden, attention, hidden * (2 + shape.post_mlp_layernorm) + visited + shared + 2 * experts / rows)


def _attention(shape: ModelShape, fused: bool) -> float:
    """Numbers per token and layer between attention's norm and its output projection.

    The projection's output, rotated queries and keys, and the result; batched products copy their factors.
    """
    heads, groups, size = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    if not shape.multi_latent_attention:
        return (3 * heads + 3 * groups) * size if fused else (4 * heads + 4 * groups + 4) * size
    unrotated, rotary, value = shape.qk_head_dim or 0, shape.qk_pos_emb_head_dim or 0, shape.v_head_dim or 0
    latents = 2 * ((shape.q_lora_rank or 0) + (shape.kv_lora_rank or 0)) + rotary
    return latents + heads * (3 if fused else 4) * (unrotated + rotary + value)


def _kept(sizes: list[Layer], config: MegatronConfig) -> Iterator[float]:
    """Numbers per token that each layer of a stage keeps."""
    if config.recompute == "full":
        count = config.recompute_num_layers or 1
        for place, size in enumerate(sizes):
            if config.recompute_method == "block":
                yield size.input if place < count else size.all
            else:
                yield size.input if place % count == 0 else 0
        if config.recompute_method != "block":  # while a group of layers is computed again
            yield max(
                (sum(size.all for size in sizes[at : at + count]) for at in range(0, len(sizes), count)), default=0
            )
        return
    modules = set(config.recompute_modules or ()) if config.recompute == "selective" else set()
    for size in sizes:
        yield size.input + size.attention + (size.input if modules & {"mlp", "moe"} else size.mlp)


def _logits(shape: ModelShape, config: MegatronConfig, own_T: int, width: int, *, value_head: bool) -> int:
    """Bytes of the output layer, as :func:`slime_core.ops.linear_log_probs_and_entropy` takes them."""
    hidden = own_T * shape.hidden_size * (3 * width + 4)
    if value_head:
        return hidden
    columns = shape.padded_vocab_size(config.tensor_model_parallel_size) // config.tensor_model_parallel_size
    chunk = max(columns * own_T * width // _LOGIT_PART, 16 * MIB)
    return hidden + chunk + columns * shape.hidden_size * width
