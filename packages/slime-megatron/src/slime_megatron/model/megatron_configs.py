"""Megatron-core's own configs, from the settings, the model's shape, the device and arguments given by name."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_megatron.model.kernels import choose_kernels, found_kernels
from slime_megatron.ranks.device import Device
from slime_megatron.settings.arguments import notices, passed_on, problems
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.megatron_values import ddp_values, optimizer_values, slime_values, transformer_values


def transformer_config(shape: ModelShape, config: MegatronConfig, device: Device) -> TransformerConfig:
    """Megatron's configuration of the model and of its parallel layout.

    Raises:
        ConfigError: Megatron-core refuses a value; so for the other two.
    """
    kind: type[Any] = MLATransformerConfig if shape.multi_latent_attention else TransformerConfig
    return _made(kind, _transformer_values(shape, config, device), shape, config)


def ddp_config(shape: ModelShape, config: MegatronConfig, device: Device) -> DistributedDataParallelConfig:
    """Megatron's configuration of the gradient buffers."""
    return _made(DistributedDataParallelConfig, ddp_values(config, on_gpu=not device.is_cpu), shape, config)


def optimizer_config(shape: ModelShape, config: MegatronConfig, device: Device) -> OptimizerConfig:
    """Megatron's configuration of the optimizer."""
    values = optimizer_values(config, on_gpu=not device.is_cpu) | {"params_dtype": _dtype(config)}
    is_aware = values.pop("use_precision_aware_optimizer")
    made = _made(OptimizerConfig, values, shape, config)
    # Set afterwards: Megatron-core would ask for Transformer Engine's version, also where the optimizer is not its.
    made.use_precision_aware_optimizer = made.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = is_aware
    made.store_param_remainders &= not is_aware
    return made


def check_arguments(shape: ModelShape, config: MegatronConfig, device: Device) -> None:
    """Check ``config.megatron_args``.

    Raises:
        ConfigError: Naming everything that is wrong, a line each.
    """
    if found := list(problems(config.megatron_args, shape, config, _values(shape, config, device))):
        raise ConfigError("\n".join(found))
    transformer_config(shape, config, device)
    ddp_config(shape, config, device)
    optimizer_config(shape, config, device)


def argument_notices(
    shape: ModelShape, config: MegatronConfig, device: Device, transformer: Any, ddp: DistributedDataParallelConfig
) -> list[str]:
    """Which of ``config.megatron_args`` have no effect, and whose value Megatron changed, once a model is built."""
    made = (transformer, ddp, optimizer_config(shape, config, device))
    return notices(config.megatron_args, shape, made, _values(shape, config, device))


def _values(shape: ModelShape, config: MegatronConfig, device: Device) -> dict[str, Any]:
    return slime_values(shape, config, on_gpu=not device.is_cpu) | _transformer_values(shape, config, device)


def _made(kind: type[Any], values: dict[str, Any], shape: ModelShape, config: MegatronConfig) -> Any:
    given = passed_on(kind, config.megatron_args, shape, values)
    try:
        return kind(**values | given)
    except (ValueError, AssertionError, RuntimeError, ImportError) as error:
        others = ", ".join(f"{name} {value}" for name, value in given.items())
        with_others = f", given {others}" if given else ""
        raise ConfigError(f"Megatron-core refuses the settings{with_others}: {' '.join(str(error).split())}") from error


def _transformer_values(shape: ModelShape, config: MegatronConfig, device: Device) -> dict[str, Any]:
    on_gpu = not device.is_cpu
    te = choose_kernels(config, found_kernels(device)).te_layers
    fuses = te or bool(layers._grad_accum_fusion_available)
    return transformer_values(shape, config, on_gpu=on_gpu) | {
        "activation_func": torch.nn.functional.silu,
        "params_dtype": _dtype(config),
        "pipeline_dtype": _dtype(config),
        "gradient_accumulation_fusion": on_gpu and fuses and not config.no_gradient_accumulation_fusion,
        "moe_grouped_gemm": te and shape.num_experts is not None and TEColumnParallelGroupedLinear is not None,
    }


def _dtype(config: MegatronConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float32
