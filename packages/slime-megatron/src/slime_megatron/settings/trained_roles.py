"""The roles that a rank trains, before anything is built: their settings, and the memory that each takes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_megatron.settings.activations import ActivationMemory, activation_memory
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.memory import RoleMemory, stage_memory
from slime_megatron.settings.overrides import role_config


@dataclass(frozen=True, kw_only=True)
class TrainedRole:
    """The actor or the critic, with settings of its own.

    A ``value_head`` is in place of the output layer; a role that ``only_evaluates`` has no gradients and no optimizer.
    """

    config: MegatronConfig
    shape: ModelShape
    value_head: bool
    world_size: int
    on_gpu: bool
    only_evaluates: bool

    def memory(self, stage: int) -> RoleMemory:
        """Bytes that a rank of a pipeline stage holds between two steps."""
        how = {"value_head": self.value_head, "on_gpu": self.on_gpu, "only_evaluates": self.only_evaluates}
        return stage_memory(self.shape, self.config, self.world_size, stage, **how)

    def stages(self) -> list[RoleMemory]:
        """The memory of each pipeline stage."""
        return [self.memory(stage) for stage in range(self.config.pipeline_model_parallel_size)]

    def activations(self, stage: int, *, tokens: int, micro_batches: int) -> ActivationMemory:
        """Bytes on top of that in a step of so many micro-batches of so many tokens."""
        return activation_memory(
            self.shape,
            self.config,
            stage=stage,
            tokens=tokens,
            micro_batches=micro_batches,
            fused=self.on_gpu and self.config.bf16,
            value_head=self.value_head,
        )


def trained_roles(
    config: MegatronConfig,
    algorithm: AlgorithmConfig,
    shape: ModelShape,
    overrides: Mapping[str, Mapping[str, Any]],
    *,
    world_size: int,
    on_gpu: bool,
    only_evaluates: bool,
) -> dict[str, TrainedRole]:
    """The actor and, if the algorithm needs one and anything is trained, the critic, by role.

    Raises:
        ConfigError: An override is of an unknown role or setting, of what all roles share, or has a wrong value.
    """
    names = ("actor", "critic") if algorithm.needs_critic and not only_evaluates else ("actor",)
    return {
        role: TrainedRole(
            config=role_config(config, role, overrides),
            shape=shape,
            value_head=role == "critic" or algorithm.loss.value_head,
            world_size=world_size,
            on_gpu=on_gpu,
            only_evaluates=only_evaluates,
        )
        for role in names
    }
