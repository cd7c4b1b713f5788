"""Reports of a rank: where its time went, and which settings have no effect."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from slime_core.types import Span, TrainReport, TrainShard
from slime_megatron.model.megatron_configs import argument_notices
from slime_megatron.settings.operations import flops_model
from slime_megatron.step.debugging import profiled
from slime_megatron.worker.setup import WorkerSetup
from slime_megatron.worker.timer import PhaseTimer, reset_peak_memory
from slime_megatron.worker.trained_model import TrainedModel

logger = logging.getLogger(__name__)


class RankReports:
    """Keeps the spans of a rank's work from one report to the next."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._config, self._shape, self._device = setup.config, setup.shape, setup.device
        self._output_dir, self._rank = setup.output_dir, setup.rendezvous.rank
        self._spans: list[Span] = []

    def settings(self, actor: TrainedModel) -> None:
        """Warn once, on rank 0, of settings that have no effect, or another than asked for."""
        if self._rank:
            return
        given = (actor.config, self._device, actor.model[0].config, actor.wrapped[0].ddp_config)
        if found := argument_notices(self._shape, *given):
            logger.warning("Megatron's arguments: %s", "; ".join(found))
        if self._config.share_prompts == "auto" and (obstacles := self._config.sharing_obstacles):
            logger.warning("--share-prompts auto shares none: it does not work with %s", "; ".join(obstacles))

    def timer(self) -> PhaseTimer:
        """A timer whose phases are in the next report."""
        flops = flops_model(self._shape)
        return PhaseTimer(self._device.synchronize, flops, self._spans, f"rank {self._rank}")

    @contextlib.contextmanager
    def rollout(self, rollout_id: int) -> Iterator[PhaseTimer]:
        """A timer for training on a rollout, profiled if that is asked for."""
        with profiled(self._config, rollout_id, self._output_dir / "profile"):
            reset_peak_memory(self._device)
            yield self.timer()

    def of_training(
        self,
        shard: TrainShard,
        steps: list[dict[str, float]],
        timer: PhaseTimer,
        weight_names: list[str],
        weight_sums: NDArray[np.uint32] | None,
    ) -> TrainReport:
        """The report of a rollout, which all ranks make together."""
        spans, self._spans = self._spans, []
        return TrainReport(
            rollout_id=shard.rollout_id,
            steps=steps,
            seconds=dict(timer.seconds),
            tokens=dict(timer.tokens),
            performance=timer.performance(self._device, bf16=self._config.bf16),
            spans=spans,
            weight_names=weight_names,
            weight_sums=weight_sums,
        )
