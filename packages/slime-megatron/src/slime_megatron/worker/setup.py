"""Settings of a rank's worker, and of the roles that it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.ops import AdvantageEstimator
from slime_core.types import Rendezvous
from slime_megatron.checkpoints.find import reference_source, teacher_source
from slime_megatron.model.megatron_configs import check_arguments
from slime_megatron.ranks.device import Device
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import check_fits
from slime_megatron.settings.memory import check_memory
from slime_megatron.settings.trained_roles import trained_roles
from slime_megatron.settings.trainer_hooks import TrainerHooks
from slime_megatron.step.losses import LossFunction, loss_of


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The arguments of :func:`slime_megatron.service.start_worker`, the device, and the user's functions."""

    config: MegatronConfig
    algorithm: AlgorithmConfig
    shape: ModelShape
    rendezvous: Rendezvous
    device: Device
    estimator: AdvantageEstimator | None
    hooks: TrainerHooks
    resume_from: str | Path | None
    overrides: Mapping[str, Mapping[str, Any]]
    output_dir: Path
    quantized_as: str | Path | None
    take_turns: bool
    most_behind: int
    weights_first: bool
    only_evaluates: bool

    @cached_property
    def loss(self) -> LossFunction:
        """The actor's loss."""
        return loss_of(self.algorithm)

    @property
    def takes_turns(self) -> bool:
        """Whether actor and critic take turns in device memory."""
        return self.take_turns and self.algorithm.needs_critic and not self.only_evaluates

    def role_configs(self) -> dict[str, MegatronConfig]:
        """Settings of each role that is trained, checked before ranks meet.

        Raises:
            ConfigError: Some do not fit the model, the device does not hold the roles, or the run has no critic that
                overrides are for.
        """
        _ = self.loss  # a loss that cannot be had is said before ranks meet, too
        if "critic" in self.overrides and not self.algorithm.needs_critic:
            raise ConfigError("overrides of the role critic: there is none; add --advantage-estimator ppo")
        found = trained_roles(
            self.config,
            self.algorithm,
            self.shape,
            self.overrides,
            world_size=self.rendezvous.world_size,
            on_gpu=not self.device.is_cpu,
            only_evaluates=self.only_evaluates,
        )
        for role in found.values():
            check_fits(role.config, self.shape)
            check_arguments(self.shape, role.config, self.device)
        held = {name: role.stages() for name, role in found.items()}
        check_memory(held, self.device.memory_bytes, take_turns=self.takes_turns)
        return {name: role.config for name, role in found.items()}

    @property
    def frozen_sources(self) -> dict[str, Path | None]:
        """Checkpoints of the roles that are not trained; ``None`` for the actor's first weights."""
        sources: dict[str, Path | None] = {}
        if self.algorithm.needs_reference:
            own = self.config.base_is_reference
            sources["reference"] = (
                None if own else reference_source(self.config.load, self.config.ref_load, self.resume_from)
            )
        if self.algorithm.uses_advantages and (teacher := teacher_source(self.config)) is not None:
            sources["teacher"] = teacher
        return sources
