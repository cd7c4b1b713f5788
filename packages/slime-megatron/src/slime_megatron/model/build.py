"""From a model's shape to Megatron's own GPTModel, in the chunks that a pipeline rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from slime_convert.shape import ModelShape
from slime_megatron.model import routing
from slime_megatron.model.attention import PackedAttention, PackedParams
from slime_megatron.model.kernels import Kernels, choose_kernels, found_kernels
from slime_megatron.model.megatron_configs import transformer_config
from slime_megatron.model.packing import PackedBatch
from slime_megatron.model.parts import (
    VALUE_HEAD,
    HiddenOutput,
    LoadRouter,
    PostNormLayer,
    RMSNorm,
    Rotary,
    ValueHead,
    WholeLinear,
)
from slime_megatron.model.te_layers import TEAttention, fusing_without_apex, local_name, mark_whole_weights, stop_fusing
from slime_megatron.ranks.device import Device
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import check_fits

Chunks = list[Any]
"""The parts of the model that this pipeline rank holds: one, or one per virtual stage. GPTModel, or wrapped in DDP."""


def build_model(
    shape: ModelShape, config: MegatronConfig, device: Device, *, random_weights: bool = True, value_head: bool = False
) -> Chunks:
    """This rank's part of a model.

    Without ``random_weights`` matrices are zero until weights are loaded, and the vocabulary's padding stays so. A
    ``value_head`` is in place of the output layer; the last chunk then gives a number per token.

    Raises:
        ConfigError: The model does not fit the parallel layout, or has parts that are not supported, or the layers
            that are asked for cannot be used here.
    """
    check_fits(config, shape)
    kernels = choose_kernels(config, found_kernels(device))
    transformer = transformer_config(shape, config, device)
    if not random_weights:
        for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
            setattr(transformer, name, torch.nn.init.zeros_)
    virtual = config.virtual_pipeline_model_parallel_size
    stages = range(virtual) if virtual else [None]
    chunks = [_build_chunk(shape, config, transformer, stage, value_head, kernels) for stage in stages]
    for chunk in chunks:
        # Prediction modules are loaded, saved and exported; they are neither run nor trained.
        chunk.mtp_process = False
        if hasattr(chunk, "mtp"):
            chunk.mtp.requires_grad_(False)
            if not chunk.pre_process:
                chunk.embedding.requires_grad_(False)
    transformer.mtp_num_layers = None
    return chunks


def run(chunk: Any, batch: PackedBatch) -> torch.Tensor:
    """Run a packed batch through a chunk; the last one gives hidden states, 1 × T × D, or a value head's 1 × T × 1."""
    packed = PackedParams(qkv_format="sbhd", layout=batch.attention, positions_T=batch.positions_T)
    model, padding_1T = bare(chunk), None
    if _regulates_load(model.config):
        padding_1T = batch.padding_T[None]
        if model.config.sequence_parallel and not model.pre_process:
            # Megatron-core 0.16.1 gives a rank its part on the first stage alone.
            padding_1T = scatter_to_sequence_parallel_region(batch.padding_T[:, None]).T
    routing.begin(model, batch.routing)
    output: torch.Tensor = chunk(batch.tokens_T[None], None, None, packed_seq_params=packed, padding_mask=padding_1T)
    routing.record(model, batch.routing)
    return output


def _regulates_load(config: TransformerConfig) -> bool:
    """Whether it matters which tokens are padding: routers count the others."""
    regulates = config.moe_aux_loss_coeff or config.moe_z_loss_coeff or config.moe_router_bias_update_rate
    return config.num_moe_experts is not None and bool(regulates)


def bare(chunk: Any) -> GPTModel:
    """The GPTModel, also of a chunk in Megatron's wrapper."""
    return chunk if isinstance(chunk, GPTModel) else chunk.module


def output_weight(chunk: Any) -> torch.Tensor:
    """This rank's rows of the output layer, which may be those of the embedding; of a last stage's chunk."""
    model = bare(chunk)
    tied = model.share_embeddings_and_output_weights
    weight: torch.Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def named_weights(chunks: Chunks, *, with_copies: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the routers' biases, by Megatron's names with layers and experts numbered in the whole model.

    Names are those of local layers, also of norms that Transformer Engine's hold in the linear layer after them. A last
    stage's copy of the embedding is left out, unless asked for.
    """
    for chunk in chunks:
        model = bare(chunk)
        offsets = {str(place): layer.layer_number - 1 for place, layer in enumerate(model.decoder.layers)}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            words = local_name(name).split(".")
            is_copy = words[0] == "embedding" and not model.pre_process
            if (is_copy and not with_copies) or words[-1] not in ("weight", "bias", "expert_bias"):
                continue
            if words[0] == "output_layer" and isinstance(model.output_layer, ValueHead):
                words = VALUE_HEAD.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(offsets[words[2]])
            if "local_experts" in words:
                place = words.index("local_experts") + 1
                words[place] = str(int(words[place]) + _first_expert(model.config))
            yield ".".join(words), tensor


def freeze_weights(chunks: Chunks, config: MegatronConfig) -> None:
    """Leave the weights out of training that the settings say do not train."""
    for chunk in chunks:
        model = bare(chunk)
        config.selection.freeze(named_weights([model]), tied=model.share_embeddings_and_output_weights)
        covers_weights = config.recompute == "full" or bool(set(config.recompute_modules or ()) - {"core_attn"})
        if covers_weights and model.pre_process:
            model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(embedding: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Hook of a frozen embedding: layers that are computed again get gradients only if what goes into them does."""
    return hidden.requires_grad_() if torch.is_grad_enabled() and not hidden.requires_grad else hidden


def _first_expert(config: TransformerConfig) -> int:
    """The number of this rank's first expert in a layer."""
    own: int = config.num_moe_experts // config.expert_model_parallel_size
    return own * int(parallel_state.get_expert_model_parallel_rank())


def _build_chunk(
    shape: ModelShape, config: MegatronConfig, transformer: Any, stage: int | None, value_head: bool, kernels: Kernels
) -> GPTModel:
    te = kernels.te_layers
    how = {"use_transformer_engine": te, "vp_stage": stage}
    spec = get_gpt_decoder_block_spec(transformer, normalization="RMSNorm", **how)
    for layer in spec.layer_specs:
        _replace_parts(layer, shape, kernels)
    prediction = get_gpt_mtp_block_spec(transformer, spec, **how) if shape.mtp_num_layers else None
    if not te:
        spec.layer_norm = RMSNorm
        for layer in prediction.layer_specs if prediction is not None else ():
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    with fusing_without_apex() if te else contextlib.nullcontext():
        model = GPTModel(
            transformer,
            spec,
            vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not (shape.untie_embeddings_and_output_weights or value_head),
            mtp_block_spec=prediction,
            vp_stage=stage,
        )
    if te:
        mark_whole_weights(model.modules())
        stop_fusing(model.modules())
    rotary = Rotary(shape)
    for module in (model, *model.modules()):
        if isinstance(module, GPTModel | MLASelfAttention):
            module.rotary_pos_emb = rotary
    if last and value_head:
        model.output_layer = ValueHead(transformer, model.output_layer.tp_group)
    elif last:
        model.output_layer.__class__ = HiddenOutput
    return model


def _replace_parts(layer: Any, shape: ModelShape, kernels: Kernels) -> None:
    """Put our attention and router into the spec of a layer, and into a local one our norms and projections."""
    parts = layer.submodules
    if hasattr(parts.mlp.submodules, "router"):
        parts.mlp.submodules.router = LoadRouter
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(
        module=TEAttention if kernels.te_attention else PackedAttention, params={"flash": kernels.flash}
    )
    if not kernels.te_layers:
        _replace_local_parts(parts, attention, shape)
    if shape.post_self_attn_layernorm or shape.post_mlp_layernorm:
        layer.module = PostNormLayer
        layer.params = {"after_attention": shape.post_self_attn_layernorm, "after_mlp": shape.post_mlp_layernorm}


def _replace_local_parts(parts: Any, attention: Any, shape: ModelShape) -> None:
    if shape.multi_latent_attention:
        attention.linear_kv_down_proj = attention.linear_q_down_proj = WholeLinear
    for owner in (parts, attention):
        for name in ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(owner, name, IdentityOp) is not IdentityOp:
                setattr(owner, name, RMSNorm)
