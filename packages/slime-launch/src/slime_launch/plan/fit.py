"""Whether everything fits into memory, and if not, which settings would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from slime_convert.shape import ModelShape
from slime_core.errors import ConfigError
from slime_launch.config import ClusterConfig, Settings
from slime_launch.devices import DeviceSpec
from slime_launch.overrides import Overrides
from slime_launch.plan.cost import Sizes
from slime_launch.plan.engines import EngineEstimate
from slime_launch.plan.layout import BatchSizes, batch_of
from slime_launch.plan.memory import Phase, TrainerMemory, gib, trainer_memory
from slime_megatron.service import MegatronConfig, check_fits, flag_name

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def check_trainer(
    settings: Settings, shape: ModelShape, device: DeviceSpec, memory: TrainerMemory, sizes: Sizes, overrides: Overrides
) -> None:
    """Check that a trainer rank fits on its device.

    Raises:
        ConfigError: It does not; with its parts, and settings that would do.
    """
    if memory.total <= device.memory:
        return
    raise ConfigError(
        f"a trainer rank takes {gib(memory.total)} in a step ({memory.parts()}), and {device.name} has "
        f"{gib(device.memory)}; {_advice(settings, shape, device, sizes, overrides)}"
    )


def memory_in_step(
    settings: Settings,
    shape: ModelShape,
    device: DeviceSpec,
    batch: BatchSizes | None,
    sizes: Sizes,
    overrides: Overrides,
) -> TrainerMemory:
    """The memory of a trainer rank on a batch; without one it evaluates, sample by sample."""
    tokens = sizes.sample_tokens if batch is None else batch.tokens_per_micro_batch
    count = 1 if batch is None else batch.micro_batches_per_step
    return trainer_memory(settings, shape, device, tokens=tokens, micro_batches=count, overrides=overrides)


def _advice(settings: Settings, shape: ModelShape, device: DeviceSpec, sizes: Sizes, overrides: Overrides) -> str:
    for change in _changes(settings.megatron, settings.cluster, shape):
        try:
            other = dataclasses.replace(settings, megatron=dataclasses.replace(settings.megatron, **change))
            check_fits(other.megatron, shape)
            batch = None if settings.kind.only_evaluates else batch_of(other, sizes)
            found = memory_in_step(other, shape, device, batch, sizes, overrides)
        except ConfigError:
            continue
        if found.total <= device.memory:
            given = " ".join(_typed(name, value) for name, value in change.items() if value is not False)
            return f"{given} needs {gib(found.total)}"
    ranks = settings.cluster.actor_gpus
    can_offload = not device.is_cpu and not settings.megatron.offload_fraction
    return (
        f"no layout of {ranks} rank{'s' * (ranks > 1)} that was tried fits; train on more GPUs (--actor-num-nodes, "
        f"--actor-num-gpus-per-node), or give {'--optimizer-cpu-offload or ' * can_offload}--lora-rank"
    )


def _changes(megatron: MegatronConfig, cluster: ClusterConfig, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Settings that take less memory, the mildest first."""
    sharing: dict[str, Any] = {} if megatron.use_distributed_optimizer else {"use_distributed_optimizer": True}
    again = {} if megatron.recompute == "full" else _FULL | {"recompute_activations": False}
    if sharing:
        yield sharing
    if again:
        yield again
    if sharing and again:
        yield sharing | again
    own, most = megatron.tensor_model_parallel_size, min(8, cluster.actor_num_gpus_per_node)
    experts = {} if shape.num_experts is None else {"expert_tensor_parallel_size": 1}
    for tensor in (size for size in (2, 4, 8) if own < size <= most):
        yield {"tensor_model_parallel_size": tensor, "sequence_parallel": True} | experts | sharing | again
    stages = megatron.pipeline_model_parallel_size
    split = {"tensor_model_parallel_size": most, "sequence_parallel": True} if most > own else {}
    for pipeline in (size for size in (2, 4, 8) if stages < size <= cluster.actor_gpus // max(1, most)):
        yield {"pipeline_model_parallel_size": pipeline} | split | experts | sharing | again


def _typed(name: str, value: Any) -> str:
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def check_engine(device: DeviceSpec, memory: EngineEstimate, sizes: Sizes) -> None:
    """Check that an engine's weights fit on its GPUs, with a cache for at least one sample of the trained model.

    Raises:
        ConfigError: They do not.
    """
    group = memory.group
    ranks, fraction = group.ranks, str(group.args.get("mem-fraction-static", "SGLang's own, about 0.85"))
    needed = sizes.sample_tokens if group.generates else max(1, sizes.prompt_tokens) if group.trained else 1
    if device.is_cpu or memory.kv_tokens >= needed:
        return
    if not group.trained or group.role != "regular":
        raise ConfigError(
            f"a {group.title} engine on {ranks} GPU{'s' * (ranks > 1)} of {device.name} ({gib(device.memory)}) has "
            f"weights of {gib(memory.weights)} on each, and with a mem_fraction_static of {fraction} room for "
            f"{memory.kv_tokens} tokens; give its group a larger num_gpus_per_engine or mem_fraction_static"
        )
    left = f"leave room for {memory.kv_tokens} tokens" if memory.kv_cache else "do not fit"
    raise ConfigError(
        f"an engine on {ranks} GPU{'s' * (ranks > 1)} of {device.name} ({gib(device.memory)}): with "
        f"--sglang-mem-fraction-static ({fraction}) its weights, {gib(memory.weights)} each, {left}, and a sample "
        f"takes {sizes.sample_tokens}; give a larger --rollout-num-gpus-per-engine or --sglang-mem-fraction-static, or "
        "a smaller --rollout-max-response-len"
    )


def check_phases(device: DeviceSpec, found: list[Phase]) -> None:
    """Check what ranks and engines need together, where they share memory.

    Raises:
        ConfigError: There is too little in a phase.
    """
    for phase in found:
        if phase.where.startswith("host memory") and phase.needed > phase.available:
            raise ConfigError(
                f"frozen models, an offloaded optimizer, and trainers that give their memory back, take "
                f"{gib(phase.needed)} of the host memory of a node, which has {gib(phase.available)}; train on more "
                "nodes, or give --no-offload-train or a smaller --optimizer-offload-fraction"
            )
        together = phase.where == "machine" or phase.where.startswith("shared GPU")
        if together and phase.needed > phase.available:
            raise ConfigError(
                f"to {phase.phase}, ranks and engines need {gib(phase.needed)} together ({phase.where}), and there are "
                f"{gib(phase.available)}; "
                + (
                    "give fewer workers or a smaller model"
                    if device.is_cpu
                    else "give a smaller --sglang-mem-fraction-static, or --rollout-num-gpus in place of --colocate"
                    + (", or leave out --no-offload-train and --no-offload-rollout" if "awake" in phase.where else "")
                )
            )
