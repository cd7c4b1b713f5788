"""Megatron's schedule over micro-batches: a train step, and log-probs without gradient. N: trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.config import AlgorithmConfig
from slime_core.ops import Statistics, loss_weights, mis_weight_sums
from slime_core.ops.tokens import needed
from slime_core.types import TrainStep
from slime_megatron.losses import DRIFT_WEIGHT, Loss, LossInputs
from slime_megatron.packing import MicroBatch, PackedBatch
from slime_megatron.plan import PlannedBatch, StepPlan

Packed = Iterator[PackedBatch]
"""Micro-batches on the device, each packed when it is asked for."""

# The loss and its terms are sums under the token weights. Every other metric is a mean over the tokens that were
# computed: samples that contribute nothing are not, and what they would have given is unknown.
_SUMS = ("loss", "pg_loss", "entropy_loss", "kl_loss")
_WEIGHT = "computed_weight"
_DRIFT = ("mismatch_", "train_rollout_logprob_")


@torch.no_grad()
def evaluate(model: Any, packed: Packed, count: int, *, temperature: float) -> list[torch.Tensor]:
    """Log-probs (nats) of the targets of ``count`` micro-batches [N], without gradient."""

    def forward_step(batches: Packed, model: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        log_probs_N, _ = model(next(batches), temperature=temperature)
        return log_probs_N, lambda output_N, non_loss_data: output_N

    results: list[torch.Tensor] = _schedule(
        forward_step, packed, model, count, forward_only=True, collect_non_loss_data=True
    )
    return results


def forward_backward(
    model: Any, plan: StepPlan, packed: Packed, loss: Loss, algorithm: AlgorithmConfig, *, temperature: float
) -> dict[str, float]:
    """Fill the gradient buffers with the gradient of the step's loss over all ranks.

    The loss is a sum over tokens under weights whose denominators are the whole step's, so neither the division
    into micro-batches nor that into ranks changes it. Megatron divides by both numbers; the loss is multiplied by
    them to take that back. Returns the step's metrics, equal on all ranks.
    """
    mis_sums = None
    if loss.uses_advantages and algorithm.needs_step_sums:
        mis_sums = step_mis_sums(plan, algorithm, next(model.parameters()).device)
    count = len(plan.batches)
    if count == 0:  # on all ranks
        finalize_model_grads([model])
        return step_metrics([])
    scale = count * parallel_state.get_data_parallel_world_size()
    planned = iter(plan.batches)

    def forward_step(batches: Packed, model: Any) -> tuple[torch.Tensor, Any]:
        log_probs_N, entropy_N = model(next(batches), temperature=temperature, with_entropy=algorithm.entropy_coef != 0)
        return log_probs_N, partial(_loss, loss, next(planned), plan.step, algorithm, scale, entropy_N, mis_sums)

    return step_metrics(_schedule(forward_step, packed, model, count))


def _schedule(forward_step: Any, packed: Packed, model: Any, count: int, **how: bool) -> list[Any]:
    """Run Megatron's schedule; what the loss function gave for each micro-batch."""
    if count == 0:
        return []
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=packed,
        model=[model],
        num_microbatches=count,
        seq_length=1,  # micro-batches differ in length, and the schedule without a pipeline does not ask
        micro_batch_size=1,
        **how,
    )
    return results


def _loss(
    loss: Loss,
    planned: PlannedBatch,
    step: TrainStep,
    algorithm: AlgorithmConfig,
    scale: int,
    entropy_N: torch.Tensor | None,
    mis_sums: torch.Tensor | None,
    log_probs_N: torch.Tensor,
) -> tuple[torch.Tensor, Statistics]:
    """The micro-batch's share of the step's loss, times ``scale``, and its metrics."""
    batch, device = planned.batch, log_probs_N.device
    if not batch.samples:
        return log_probs_N.sum(), Statistics()  # 0, with a gradient of 0 for every parameter
    weights_N = token_weights(batch, step, algorithm, device)
    rollout_N, teacher_N = batch.values("rollout_log_probs"), batch.values("teacher_log_probs")
    value, statistics = loss(
        LossInputs(
            algorithm=algorithm,
            log_probs_N=log_probs_N,
            weights_N=weights_N,
            lengths=batch.target_lengths,
            entropy_N=entropy_N,
            advantages_N=planned.advantages_N,
            old_log_probs_N=planned.old_log_probs_N,
            ref_log_probs_N=planned.ref_log_probs_N,
            rollout_log_probs_N=None if rollout_N is None else rollout_N.to(device),
            teacher_log_probs_N=None if teacher_N is None else teacher_N.to(device),
            mis_sums=mis_sums,
        )
    )
    return value * scale, Statistics.merged([statistics, Statistics(sums={_WEIGHT: weights_N.sum()})])


def token_weights(batch: MicroBatch, step: TrainStep, algorithm: AlgorithmConfig, device: torch.device) -> torch.Tensor:
    """The weights of a micro-batch's trained tokens in the step's loss [N]."""
    return loss_weights(
        algorithm,
        [[1] * count for count in batch.target_lengths],
        trajectory_tokens=[sample.trajectory_tokens for sample in batch.samples],
        global_trajectories=step.global_trajectories,
        global_tokens=step.global_tokens,
        device=device,
    )


def step_mis_sums(plan: StepPlan, algorithm: AlgorithmConfig, device: torch.device) -> torch.Tensor:
    """:func:`slime_core.ops.mis_weight_sums` over the step and all data-parallel ranks; all call this [2]."""
    sums_2, flag = torch.zeros(2, device=device), "--mis-batch-normalize"
    for planned in plan.batches:
        batch = planned.batch
        if not batch.samples:
            continue
        rollout_N = needed(batch.values("rollout_log_probs"), flag, "the engine's log-probs")
        sums_2 += mis_weight_sums(
            algorithm,
            train_log_probs_T=needed(planned.old_log_probs_N, flag, "the log-probs from before the update"),
            rollout_log_probs_T=rollout_N.to(device),
            mask_T=torch.ones_like(rollout_N, device=device),
            weights_T=token_weights(batch, plan.step, algorithm, device),
            lengths=batch.target_lengths,
        )
    dist.all_reduce(sums_2, group=parallel_state.get_data_parallel_group())
    return sums_2


def step_metrics(parts: Sequence[Statistics]) -> dict[str, float]:
    """The statistics of micro-batches as metrics of the step, the same on all ranks. Called by every rank.

    Ranks may have had nothing to compute, so what they know is gathered by name.
    """
    gathered: list[Statistics] = [Statistics()] * parallel_state.get_data_parallel_world_size()
    own = _on_cpu(Statistics.merged(parts))
    dist.all_gather_object(gathered, own, group=parallel_state.get_data_parallel_group())
    metrics = {name: float(value) for name, value in Statistics.merged(gathered).metrics().items()}
    weight, drift_weight = metrics.pop(_WEIGHT, 0.0), metrics.pop(DRIFT_WEIGHT, 0.0)
    for name in {name for part in gathered for name in part.sums} - {*_SUMS, _WEIGHT, DRIFT_WEIGHT}:
        metrics[name] /= (drift_weight if name.startswith(_DRIFT) else weight) or 1.0
    return metrics


def _on_cpu(statistics: Statistics) -> Statistics:
    kinds = {kind.name: getattr(statistics, kind.name) for kind in fields(statistics)}
    return Statistics(**{kind: {name: value.cpu() for name, value in values.items()} for kind, values in kinds.items()})
