"""Forward passes and optimizer steps of a rank's roles, on its shard of a rollout."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from slime_core.interfaces import Role
from slime_core.types import TrainSample, TrainShard
from slime_megatron.model.kernels import choose_kernels, found_kernels
from slime_megatron.model.packing import ContextParallel, MicroBatch, PackedBatch, trained_positions
from slime_megatron.settings.trainer_hooks import BEFORE_LOG_PROBS, BEFORE_TRAIN_STEP, PREFIXES
from slime_megatron.step.debugging import ShownSamples
from slime_megatron.step.losses import CRITIC_LOSS, LossFunction
from slime_megatron.step.optimizer import check_finite
from slime_megatron.step.pairs import score_row, scored
from slime_megatron.step.passes import Head, Reader, forward_backward, forward_values, read_values
from slime_megatron.step.plan import Planner, StepPlan
from slime_megatron.worker.roles import Roles
from slime_megatron.worker.setup import WorkerSetup
from slime_megatron.worker.timer import PhaseTimer
from slime_megatron.worker.trained_model import TrainedModel

logger = logging.getLogger(__name__)

_PHASES: dict[Role, str] = {
    "actor": "log_probs",
    "critic": "values",
    "reference": "ref_log_probs",
    "teacher": "teacher_log_probs",
}
"""Names of the forward passes in reports."""

Metrics = dict[str, float]


class RolePasses:
    """Log-probs, values and gradients of the roles. All ranks call its methods together.

    A ``timer`` counts the time and the tokens of each pass.
    """

    def __init__(self, setup: WorkerSetup, roles: Roles) -> None:
        self._config, self._algorithm, self._shape = setup.config, setup.algorithm, setup.shape
        self._device, self._loss = setup.device, setup.loss
        self._estimator, self._hooks = setup.estimator, setup.hooks
        self._roles = roles
        self._share_prompts = self._sharing()

    def _sharing(self) -> str:
        """``--share-prompts``, but off where a model's attention kernel cannot do it."""
        found = found_kernels(self._device)
        wanted = self._config.share_prompts if self._config.may_share_prompts else "off"
        if wanted == "off" or all(choose_kernels(one.config, found).shares_prompts for one in self._roles.trained):
            return wanted
        if torch.distributed.get_rank() == 0:
            logger.warning("prompts are not shared: Transformer Engine's attention cannot, and this GPU has no other")
        return "off"

    def per_token(self, shard: TrainShard, role: Role, timer: PhaseTimer) -> list[NDArray[np.float32]]:
        """Log-probs (nats), values or scores of every sample's response tokens; 0 where there is none."""
        seen = scored(shard) if self._loss.scores else shard
        steps = self._planner(shard.temperature, timer).micro_batches(seen, set(trained_positions(seen)))
        batches = [batch for step in steps for batch in step]
        found: dict[int, NDArray[np.float32]] = {}
        for batch, values_N in zip(batches, self._evaluate(shard.temperature, timer, role, batches), strict=True):
            found |= dict(zip(batch.positions, batch.per_sample(values_N), strict=True))
        if self._loss.scores:
            return [score_row(sample, found.get(position)) for position, sample in enumerate(shard.samples)]
        return [
            found.get(position, np.zeros(sample.response_length, np.float32))
            for position, sample in enumerate(shard.samples)
        ]

    def evaluate(self, shard: TrainShard, timer: PhaseTimer) -> Metrics:
        """The loss of a shard of one step, and its metrics; equal on all ranks."""
        head = self._head(self._loss, shard.temperature)
        [plan] = self.plan(shard, timer)
        batches = [planned.batch for planned in plan.batches]
        packed = partial(self._packed, batches, timer, "evaluate", head, 1, replays=True)
        with torch.no_grad():
            return forward_backward(
                self._roles.actor.wrapped, plan, packed, self._loss, self._algorithm, head, forward_only=True
            )

    def plan(self, shard: TrainShard, timer: PhaseTimer) -> list[StepPlan]:
        """The optimizer steps of a shard, with all that is computed before the first."""
        return self._planner(shard.temperature, timer).plan(shard)

    def train(
        self,
        role: TrainedModel,
        shard: TrainShard,
        plans: Sequence[StepPlan],
        steps: Sequence[Metrics],
        timer: PhaseTimer,
        shown: ShownSamples | None = None,
    ) -> None:
        """Take the steps of the actor or the critic, and put the metrics of each into that of ``steps``.

        ``shown`` sees the micro-batches that are trained on.
        """
        is_actor = role is self._roles.actor
        loss = self._loss if is_actor else CRITIC_LOSS
        head = self._head(loss, shard.temperature)
        self._roles.begin_rollout(role)
        for number, (plan, step) in enumerate(zip(plans, steps, strict=True)):
            metrics = self._optimize(role, loss, (shard.rollout_id, number), plan, head, timer, shown)
            step |= metrics if is_actor else {f"critic-{name}": value for name, value in metrics.items()}

    def _planner(self, temperature: float, timer: PhaseTimer) -> Planner:
        return Planner(
            algorithm=self._algorithm,
            loss=self._loss,
            estimator=self._estimator,
            micro_batch=self._micro_batch,
            evaluate=partial(self._evaluate, temperature, timer),
            teacher="teacher" in self._roles.actor.frozen,
            versions=self._roles.actor.versions,
            device=self._device.torch_device,
        )

    def _micro_batch(self, samples: Sequence[TrainSample], positions: Sequence[int]) -> MicroBatch:
        return MicroBatch(
            samples,
            positions,
            share_prompts=self._share_prompts,
            multiple_of=self._config.tensor_model_parallel_size if self._config.splits_sequences else 1,
            context=ContextParallel(
                parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
            ),
        )

    def _head(self, loss: LossFunction, temperature: float) -> Reader:
        return read_values if loss.value_head else Head(vocab_size=self._shape.vocab_size, temperature=temperature)

    def _packed(
        self,
        batches: Sequence[MicroBatch],
        timer: PhaseTimer,
        phase: str,
        head: Reader,
        passes: int,
        chunk: int,
        *,
        replays: bool = False,
        records: bool = False,
    ) -> Iterator[PackedBatch]:
        """The batches on the device, each packed when it is asked for: those before it can be freed by then.

        They are counted under ``phase`` with so many ``passes``, each as costly as a forward pass, for the first chunk.
        """
        for batch in batches:
            packed = batch.pack(self._device.torch_device, replays=replays, records=records)
            if chunk == 0:
                logits = len(packed.targets_M) if isinstance(head, Head) else 0
                timer.count(phase, packed, logits=logits, passes=passes)
            yield packed

    def _evaluate(
        self, temperature: float, timer: PhaseTimer, role: Role | int, batches: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        """A number for each target of each micro-batch [N], under a role or a kept version of the policy."""
        phase = _PHASES["actor" if isinstance(role, int) else role]
        head = self._head(CRITIC_LOSS if role == "critic" else self._loss, temperature)
        # Reference, teacher and critic are other models, whose routers choose for themselves.
        replays = role == "actor" or isinstance(role, int)
        records = replays and self._config.use_routing_replay
        packed = partial(self._packed, batches, timer, phase, head, 1, replays=replays, records=records)
        with timer.phase(phase), self._roles.model(role) as model:
            if role != "critic":
                self._hooks(BEFORE_LOG_PROBS, model, PREFIXES.get(str(role), ""))
            return forward_values(model, packed, batches, head)

    def _optimize(
        self,
        role: TrainedModel,
        loss: LossFunction,
        place: tuple[int, int],
        plan: StepPlan,
        head: Reader,
        timer: PhaseTimer,
        shown: ShownSamples | None = None,
    ) -> Metrics:
        """One optimizer step, and its metrics. Its ``place``: the rollout, and its number among the rollout's steps."""
        see = None if shown is None or loss.value_head else shown.see
        replays = role is self._roles.actor
        prefix = "" if replays else "critic_"
        with role.undone_on_error():
            with timer.phase(phase := f"{prefix}forward_backward"):
                role.zero_gradients()
                self._hooks(BEFORE_TRAIN_STEP, *place, role.wrapped, role.optimizer, role.scheduler)
                batches = [planned.batch for planned in plan.batches]
                # Adapters cost little; the base's weights have no gradient.
                passes = 3 if role.config.lora is None else 2
                packed = partial(self._packed, batches, timer, phase, head, passes, replays=replays)
                metrics = forward_backward(role.wrapped, plan, packed, loss, self._algorithm, head, see=see)
            with timer.phase(f"{prefix}optimizer"):
                check_finite(metrics)
                self._roles.release()
                return metrics | role.step()
