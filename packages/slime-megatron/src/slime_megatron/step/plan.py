"""The steps of a rank for a rollout, and what is computed before the first: micro-batches, log-probs, advantages.

Notation: N trained response tokens, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.config import AlgorithmConfig
from slime_core.errors import DataError
from slime_core.interfaces import Role
from slime_core.ops import AdvantageEstimator, policy_advantages
from slime_core.types import TrainSample, TrainShard, TrainStep
from slime_megatron.model.packing import MicroBatch, step_positions, target_values, target_versions, trained_positions
from slime_megatron.ranks.exchange import gather_values
from slime_megatron.step.losses import LossFunction, TokenInputs
from slime_megatron.step.pairs import paired, scored
from slime_megatron.weights.versions import KeptVersions

Columns = dict[str, list[torch.Tensor]]
"""Numbers of the targets of each micro-batch [N], under the names of :class:`TokenInputs`."""
_BROUGHT = ("rollout_log_probs_N", "teacher_log_probs_N")


@dataclass(frozen=True)
class PlannedBatch(TokenInputs):
    """A micro-batch and, as the loss takes them, the numbers that were computed for it before the first step."""

    batch: MicroBatch

    def known(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        """The :class:`TokenInputs` by name, also those that are not computed but brought by the samples."""
        found = {field.name: getattr(self, field.name) for field in fields(TokenInputs)}
        samples = self.batch.samples
        found |= {name: target_values(samples, name.removesuffix("_N")) for name in _BROUGHT if found[name] is None}
        return {name: None if one is None else one.to(device) for name, one in found.items()}


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of one rank. All data-parallel ranks have equally many micro-batches."""

    step: TrainStep
    batches: list[PlannedBatch]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans a rank's steps of a rollout, with log-probs and values that ``evaluate`` gives under the model of a role.

    With ``teacher``, that is one of them; otherwise the teacher's log-probs come with the samples. A number in place of
    a role is a version of the policy's weights, one of ``versions``.
    """

    algorithm: AlgorithmConfig
    loss: LossFunction
    estimator: AdvantageEstimator | None
    micro_batch: Callable[[Sequence[TrainSample], Sequence[int]], MicroBatch]
    evaluate: Callable[[Role | int, list[MicroBatch]], list[torch.Tensor]]
    device: torch.device
    teacher: bool = False
    versions: KeptVersions | None = None

    def plan(self, shard: TrainShard) -> list[StepPlan]:
        """The steps of a rollout. Every data-parallel rank must call this: whitening needs all of them.

        Samples that add nothing to the loss are left out, where that is known before a forward pass.
        """
        shard = self.arranged(shard)
        trained = trained_positions(shard)
        late = self.algorithm.advantages_need_log_probs or self.algorithm.needs_critic
        estimated: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        kept = set(trained)
        if self.algorithm.uses_advantages:
            samples = [shard.samples[position] for position in trained]
            check_log_probs(samples, self.algorithm, teacher=self.algorithm.use_opd and not self.teacher)
            if not late:
                estimated = self._advantages(shard, trained)
                if self.algorithm.zero_advantages_add_nothing:
                    kept = {position for position, (values_N, _) in estimated.items() if values_N.any()}
        steps = self.micro_batches(shard, kept)
        batches = [batch for step in steps for batch in step]
        before = self._before(batches, len(steps))
        if self.algorithm.uses_advantages and late:
            estimated = self._advantages(shard, [at for batch in batches for at in batch.positions], before)
        columns = before | self._by_batch(batches, estimated)
        rows = enumerate(batches)
        planned = (PlannedBatch(batch, **{name: values[at] for name, values in columns.items()}) for at, batch in rows)
        return [StepPlan(step, [next(planned) for _ in row]) for step, row in zip(shard.steps, steps, strict=True)]

    def arranged(self, shard: TrainShard) -> TrainShard:
        """The shard as the loss takes it: preference pairs in order, one place per response for its score."""
        if self.loss.pairs:
            shard = paired(shard)
        return scored(shard) if self.loss.scores else shard

    def micro_batches(self, shard: TrainShard, kept: Container[int]) -> list[list[MicroBatch]]:
        """The micro-batches of each step, of samples whose positions are in ``kept``, and fillers.

        Every data-parallel rank must call this, and gets equally many: layers that gather over ranks wait for all. With
        virtual stages they are a multiple of the pipeline's ranks, as Megatron's schedule asks for.
        """
        steps = step_positions(shard, kept)
        counts = torch.tensor([len(step) for step in steps], dtype=torch.long, device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        unit = parallel_state.get_pipeline_model_parallel_world_size() if virtual else 1
        wanted = [-(-count // unit) * unit for count in counts.tolist()]
        filled = (step + [[]] * (count - len(step)) for step, count in zip(steps, wanted, strict=True))
        return [[self.micro_batch([shard.samples[at] for at in row], row) for row in step] for step in filled]

    def _before(self, batches: list[MicroBatch], steps: int) -> Columns:
        """Numbers that forward passes give before the first step, under the names of :class:`TokenInputs`."""
        found: Columns = {}
        if self.algorithm.needs_reference:
            found["ref_log_probs_N"] = self.evaluate("reference", batches)
        if self.teacher:
            found["teacher_log_probs_N"] = self.evaluate("teacher", batches)
        found["old_log_probs_N"] = self._old_log_probs(batches, steps)
        if self.algorithm.needs_critic:  # last, as its steps come next: where roles take turns, it has one
            found["old_values_N"] = self.evaluate("critic", batches)
        return {name: values for name, values in found.items() if values}

    def _old_log_probs(self, batches: list[MicroBatch], steps: int) -> list[torch.Tensor]:
        """The log-probs that the ratio compares with. Nothing where these are the policy's own at the only step."""
        if not self.algorithm.uses_advantages:
            return []
        if self.algorithm.use_rollout_logprobs:
            found = [target_values(batch.samples, "rollout_log_probs") for batch in batches]
            return [values_N.to(self.device) for values_N in found if values_N is not None]
        if self.versions is not None:
            return self._of_versions(batches, self.versions)
        needed = steps > 1 or self.algorithm.advantages_need_log_probs or self.algorithm.needs_step_sums
        return self.evaluate("actor", batches) if needed else []

    def _of_versions(self, batches: list[MicroBatch], versions: KeptVersions) -> list[torch.Tensor]:
        """Log-probs of every token under the weights that generated it, with a forward pass for each of them."""
        rows = [target_versions(batch.samples).to(self.device) for batch in batches]
        group = parallel_state.get_data_parallel_group()
        own = sorted({version for row_N in rows for version in row_N.tolist()})
        wanted = {version for versions_of in gather_values(own, group) for version in versions_of}
        found = [torch.zeros(len(row_N), device=self.device) for row_N in rows]
        for source, represented in versions.by_source(wanted).items():
            values = self.evaluate("actor" if source is None else source, batches)
            is_of = torch.tensor(represented, device=self.device)
            found = [
                torch.where(torch.isin(row_N, is_of), value_N, found_N)
                for row_N, value_N, found_N in zip(rows, values, found, strict=True)
            ]
        return found

    def _advantages(
        self, shard: TrainShard, positions: Sequence[int], before: Columns | None = None
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Advantages and returns of the trained tokens of the samples at these positions, by position.

        With whitening, every data-parallel rank must call this. Tokens that are not trained on take no part in any
        estimator, so those that are stand for the whole response.
        """
        before, samples = before or {}, [shard.samples[position] for position in positions]
        lengths = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
        teacher_N = target_values(samples, "teacher_log_probs") if self.algorithm.use_opd else None
        if self.teacher:
            teacher_N = self._joined(before.get("teacher_log_probs_N", ()))
        found = policy_advantages(
            self.algorithm,
            rewards_N=torch.tensor([sample.reward for sample in samples], dtype=torch.float32, device=self.device),
            mask_T=torch.ones(sum(lengths), device=self.device),
            lengths=lengths,
            old_log_probs_T=self._joined(before.get("old_log_probs_N", ())),
            ref_log_probs_T=self._joined(before.get("ref_log_probs_N", ())),
            teacher_log_probs_T=None if teacher_N is None else teacher_N.to(self.device),
            values_T=self._joined(before.get("old_values_N", ())) if self.algorithm.needs_critic else None,
            estimator=self.estimator,
            group=parallel_state.get_data_parallel_group(),
        )
        rows = zip(*(torch.split(values_N, lengths) for values_N in found), strict=True)
        return dict(zip(positions, rows, strict=True))

    def _by_batch(self, batches: list[MicroBatch], estimated: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Columns:
        """Advantages and returns in the order of each micro-batch's targets."""
        if not estimated:
            return {}
        rows = [[estimated[position] for position in batch.positions] for batch in batches]
        return {
            name: [self._joined([found[place] for found in row]) for row in rows]
            for place, name in enumerate(("advantages_N", "returns_N"))
        }

    def _joined(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.zeros(0, device=self.device), *values])


def check_log_probs(samples: Sequence[TrainSample], algorithm: AlgorithmConfig, *, teacher: bool) -> None:
    """Check that the samples carry the log-probs that the algorithm asks for, and with ``teacher`` the teacher's.

    Raises:
        DataError: One does not.
    """
    for wanted, name, source in (
        (algorithm.needs_rollout_log_probs, "rollout_log_probs", "the engine's"),
        (teacher, "teacher_log_probs", "the teacher's"),
    ):
        if lacking := [sample.index for sample in samples if wanted and getattr(sample, name) is None]:
            raise DataError(
                f"samples {lacking[:8]} have no {name}, {source} log-probs, which the algorithm needs; "
                "have the generate or reward function set them"
            )
