"""What a rank computes for a rollout before its first optimizer step: packed batches, log-probs, advantages.

Notation: N trained response tokens of a micro-batch, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from slime_core.config import AlgorithmConfig
from slime_core.errors import DataError
from slime_core.ops import AdvantageEstimator
from slime_core.types import TrainSample, TrainShard, TrainStep
from slime_megatron.advantages import contributes, sample_advantages
from slime_megatron.packing import PackedBatch
from slime_megatron.timing import PhaseTimer

Evaluate = Callable[[PackedBatch], torch.Tensor]
"""Log-probs (nats) of a batch's targets [N], without gradient."""


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch and what its loss is computed from.

    Attributes:
        batch: The packed samples.
        advantages_N: Advantages.
        old_log_probs_N: What the policy ratio compares with; ``None`` for the current log-probs.
        ref_log_probs_N: Log-probs under the reference model, if the loss needs them.
        rollout_log_probs_N: The engine's, if all samples have them.
    """

    batch: PackedBatch
    advantages_N: torch.Tensor
    old_log_probs_N: torch.Tensor | None = None
    ref_log_probs_N: torch.Tensor | None = None
    rollout_log_probs_N: torch.Tensor | None = None


@dataclass
class StepPlan:
    """One optimizer step of one rank, packed."""

    step: TrainStep
    micro_batches: list[MicroBatch] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that one pass over the step computes on this rank."""
        return sum(micro_batch.batch.computed_tokens for micro_batch in self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans a rank's steps of a rollout.

    Attributes:
        algorithm: What the loss needs.
        pack: Packs samples on the device.
        policy: Log-probs under the weights being trained.
        reference: Log-probs under the reference model; ``None`` without one.
        estimator: Advantage estimator of the user's own.
        device: Where advantages are computed.
    """

    algorithm: AlgorithmConfig
    pack: Callable[[Sequence[TrainSample]], PackedBatch]
    policy: Evaluate
    reference: Evaluate | None
    estimator: AdvantageEstimator | None
    device: torch.device

    def plan(self, shard: TrainShard, timer: PhaseTimer) -> list[StepPlan]:
        """The steps of a rollout. Every data-parallel rank must call this: whitening needs all of them.

        Samples that add nothing to the loss are left out, where that is known before a forward pass.
        """
        algorithm = self.algorithm
        trained = [sample for sample in shard.samples if any(sample.loss_mask)]
        _check_log_probs(trained, algorithm)
        advantages: dict[int, torch.Tensor] = {}
        kept = {id(sample) for sample in trained}
        if not algorithm.advantages_need_log_probs:
            advantages = sample_advantages(algorithm, trained, device=self.device, estimator=self.estimator)
            kept = {key for key, values in advantages.items() if contributes(values, algorithm)}
        batches = [self._batches(shard, step, kept) for step in shard.steps]
        references = self._log_probs(self.reference, "ref_log_probs", batches, timer)
        old = self._old_log_probs(batches, timer)
        if algorithm.advantages_need_log_probs:
            advantages = sample_advantages(
                algorithm,
                [sample for step in batches for batch in step for sample in batch.samples],
                device=self.device,
                estimator=self.estimator,
                old_log_probs_N=self._joined(old),
                ref_log_probs_N=self._joined(references),
            )
        plans = []
        for number, step in enumerate(shard.steps):
            plan = StepPlan(step)
            for place, batch in enumerate(batches[number]):
                plan.micro_batches.append(
                    MicroBatch(
                        batch,
                        advantages_N=torch.cat([advantages[id(sample)] for sample in batch.samples]),
                        old_log_probs_N=old[number][place] if old else None,
                        ref_log_probs_N=references[number][place] if references else None,
                        rollout_log_probs_N=_rollout_log_probs(batch),
                    )
                )
            plans.append(plan)
        return plans

    def _batches(self, shard: TrainShard, step: TrainStep, kept: set[int]) -> list[PackedBatch]:
        """The micro-batches of a step; those without a sample that is kept are left out."""
        chosen = [[shard.samples[position] for position in positions] for positions in step.micro_batches]
        chosen = [[sample for sample in samples if id(sample) in kept] for samples in chosen]
        return [self.pack(samples) for samples in chosen if samples]

    def _old_log_probs(self, batches: list[list[PackedBatch]], timer: PhaseTimer) -> list[list[torch.Tensor]]:
        """What the ratio compares with. Nothing where that is the policy's own log-probs at the only step."""
        if self.algorithm.use_rollout_logprobs:
            found = [[_rollout_log_probs(batch) for batch in step] for step in batches]
            return [[values_N for values_N in step if values_N is not None] for step in found]
        needed = len(batches) > 1 or self.algorithm.advantages_need_log_probs or self.algorithm.needs_step_sums
        return self._log_probs(self.policy if needed else None, "log_probs", batches, timer)

    def _log_probs(
        self, evaluate: Evaluate | None, phase: str, batches: list[list[PackedBatch]], timer: PhaseTimer
    ) -> list[list[torch.Tensor]]:
        if evaluate is None:
            return []
        with timer.phase(phase, sum(batch.computed_tokens for step in batches for batch in step)):
            return [[evaluate(batch) for batch in step] for step in batches]

    def _joined(self, values: list[list[torch.Tensor]]) -> torch.Tensor:
        return torch.cat([torch.zeros(0, device=self.device), *(values_N for step in values for values_N in step)])


def _rollout_log_probs(batch: PackedBatch) -> torch.Tensor | None:
    values = [sample.rollout_log_probs for sample in batch.samples]
    return None if None in values else batch.trained([row for row in values if row is not None])


def _check_log_probs(samples: Sequence[TrainSample], algorithm: AlgorithmConfig) -> None:
    """Check that the samples carry the log-probs that the algorithm asks for.

    Raises:
        DataError: One does not.
    """
    for wanted, name, source in (
        (algorithm.needs_rollout_log_probs, "rollout_log_probs", "the engine's"),
        (algorithm.use_opd, "teacher_log_probs", "the teacher's"),
    ):
        lacking = [sample.index for sample in samples if wanted and getattr(sample, name) is None]
        if lacking:
            raise DataError(
                f"samples {lacking[:8]} have no {name}, {source} log-probs, which the algorithm needs; "
                "have the generate or reward function set them"
            )
