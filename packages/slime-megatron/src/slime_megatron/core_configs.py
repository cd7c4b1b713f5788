"""Megatron-core's own configs, from the settings, the model's shape, the device and arguments given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_megatron.arguments import notices, passed_on, problems
from slime_megatron.config import MegatronConfig
from slime_megatron.device import Device


def transformer_config(shape: ModelShape, config: MegatronConfig, device: Device) -> TransformerConfig:
    """Megatron's configuration of the model and of its parallel layout.

    Raises:
        ConfigError: Core refuses a value; so for the other two.
    """
    return _made(_kind(shape), _transformer_values(shape, config, device), shape, config)


def ddp_config(shape: ModelShape, config: MegatronConfig, device: Device) -> DistributedDataParallelConfig:
    """Megatron's configuration of the gradient buffers."""
    return _made(DistributedDataParallelConfig, _ddp_values(config, device), shape, config)


def optimizer_config(shape: ModelShape, config: MegatronConfig) -> OptimizerConfig:
    """Megatron's configuration of the optimizer."""
    return _made(OptimizerConfig, _optimizer_values(config), shape, config)


def check_arguments(shape: ModelShape, config: MegatronConfig, device: Device) -> None:
    """Check ``config.megatron_args``.

    Raises:
        ConfigError: Naming everything that is wrong, a line each.
    """
    if found := list(problems(config.megatron_args, shape, config, _values(shape, config, device))):
        raise ConfigError("\n".join(found))
    transformer_config(shape, config, device)
    ddp_config(shape, config, device)
    optimizer_config(shape, config)


def argument_notices(
    shape: ModelShape, config: MegatronConfig, device: Device, transformer: Any, ddp: DistributedDataParallelConfig
) -> list[str]:
    """Which of ``config.megatron_args`` have no effect, and what core made of others, once it has built a model."""
    made = (transformer, ddp, optimizer_config(shape, config))
    return notices(config.megatron_args, shape, made, _values(shape, config, device))


def _values(shape: ModelShape, config: MegatronConfig, device: Device) -> dict[str, Any]:
    return _optimizer_values(config) | _ddp_values(config, device) | _transformer_values(shape, config, device)


def _kind(shape: ModelShape) -> type[Any]:
    kinds: dict[bool, type[Any]] = {True: MLATransformerConfig, False: TransformerConfig}
    return kinds[shape.multi_latent_attention]


def _made(kind: type[Any], values: dict[str, Any], shape: ModelShape, config: MegatronConfig) -> Any:
    given = passed_on(kind, config.megatron_args, shape)
    try:
        return kind(**values | given)
    except (ValueError, AssertionError, RuntimeError, ImportError) as error:
        others = ", ".join(f"{name} {value}" for name, value in given.items())
        with_others = f", given {others}" if given else ""
        raise ConfigError(f"Megatron-core refuses the settings{with_others}: {' '.join(str(error).split())}") from error


def _transformer_values(shape: ModelShape, config: MegatronConfig, device: Device) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(_kind(shape))}
    values = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name in known}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    virtual = config.virtual_pipeline_model_parallel_size
    return values | {
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_moe_experts": shape.num_experts,
        "mtp_num_layers": shape.mtp_num_layers or None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": config.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_size,
        "sequence_parallel": config.splits_sequences,
        # Micro-batches differ in length. Megatron-core then wants this dispatcher, also of models without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # With core's default, batched messages, two stages of virtual pipelines compute something else.
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
        "use_cpu_initialization": device.is_cpu,
        **_fused_kernels(config, device),
    }


def _fused_kernels(config: MegatronConfig, device: Device) -> dict[str, bool]:
    """Kernels that compute the same faster, on CUDA (not run there)."""
    on_gpu = not device.is_cpu
    accumulates = on_gpu and not config.no_gradient_accumulation_fusion
    return {
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "gradient_accumulation_fusion": accumulates and bool(layers._grad_accum_fusion_available),
    }


def _ddp_values(config: MegatronConfig, device: Device) -> dict[str, Any]:
    on_gpu = not device.is_cpu
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "overlap_grad_reduce": config.overlaps_gradients(on_gpu),
        "overlap_param_gather": config.overlaps_weights(on_gpu),
    }


def _optimizer_values(config: MegatronConfig) -> dict[str, Any]:
    same = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16", "optimizer")
    return {
        **{name: getattr(config, name) for name in same},
        "params_dtype": torch.bfloat16 if config.bf16 else torch.float32,
        "use_distributed_optimizer": config.use_distributed_optimizer,
    }
