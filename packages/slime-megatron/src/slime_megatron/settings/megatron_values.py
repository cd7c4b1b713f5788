"""Values that slime gives Megatron-core, from the settings, the model's shape and the device. No torch here."""

from __future__ import annotations

from typing import Any

from slime_convert.shape import ModelShape
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.megatron_fields import transformer_fields


def slime_values(shape: ModelShape, config: MegatronConfig, *, on_gpu: bool) -> dict[str, Any]:
    """All values for all configs by field, without those that only torch knows: types and functions."""
    optimizer, ddp = optimizer_values(config, on_gpu=on_gpu), ddp_values(config, on_gpu=on_gpu)
    return optimizer | ddp | transformer_values(shape, config, on_gpu=on_gpu)


def transformer_values(shape: ModelShape, config: MegatronConfig, *, on_gpu: bool) -> dict[str, Any]:
    """The model and its parallel layout."""
    values = shape.megatron_values(transformer_fields(shape.multi_latent_attention)) | layout_values(config)
    virtual = config.virtual_pipeline_model_parallel_size
    return values | {
        "mtp_num_layers": shape.mtp_num_layers or None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": config.bf16,
        "sequence_parallel": config.splits_sequences,
        # Micro-batches differ in length. Megatron-core then wants this dispatcher, also of models without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # With Megatron's default, batched messages, two stages of virtual pipelines compute something else.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        # Unless asked for, the load is balanced neither by a loss nor by a moving bias: both change the policy behind
        # the loss's back.
        "moe_router_load_balancing_type": "aux_loss" if config.megatron_args.get("moe_aux_loss_coeff") else "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "recompute_granularity": config.recompute,
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
        "recompute_modules": None if config.recompute_modules is None else list(config.recompute_modules),
        "deterministic_mode": config.deterministic_mode,
        "use_cpu_initialization": not on_gpu,
        # Kernels that compute the same faster, on CUDA (not run there).
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
    }


def layout_values(config: MegatronConfig) -> dict[str, int | None]:
    """The ranks that share a model."""
    kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model")
    sizes = {f"{kind}_parallel_size": getattr(config, f"{kind}_parallel_size") for kind in kinds}
    return sizes | {"expert_tensor_parallel_size": config.expert_tensor_size}


def ddp_values(config: MegatronConfig, *, on_gpu: bool) -> dict[str, Any]:
    """The gradient buffers."""
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_grad_reduce": config.overlaps_gradients(on_gpu),
        "overlap_param_gather": config.overlaps_weights(on_gpu),
    }


def optimizer_values(config: MegatronConfig, *, on_gpu: bool) -> dict[str, Any]:
    """The optimizer."""
    same = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16", "optimizer")
    offloads = on_gpu and bool(config.megatron_args.get("optimizer_cpu_offload"))
    return {name: getattr(config, name) for name in (*same, "use_distributed_optimizer")} | {
        "optimizer_cpu_offload": offloads,
        "optimizer_offload_fraction": 1.0,  # as on Megatron's command line; Megatron-core has 0
        # Without it, Megatron-core 0.16.1 keeps master weights on the GPU too, and cannot continue a checkpoint.
        "use_precision_aware_optimizer": offloads,
    }
