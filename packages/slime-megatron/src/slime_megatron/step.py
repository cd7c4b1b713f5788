"""One optimizer step: run Megatron's schedule over its micro-batches. Notation: N trained tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.config import AlgorithmConfig
from slime_core.ops import (
    Statistics,
    drift_statistics,
    loss_weights,
    mis_weight_sums,
    policy_objective,
    policy_statistics,
)
from slime_core.ops.corrections import weighted_sum
from slime_core.ops.needed import needed
from slime_core.types import TrainStep
from slime_megatron.advantages import teacher_log_probs
from slime_megatron.packing import PackedBatch
from slime_megatron.plan import MicroBatch, StepPlan

# The loss and its terms are sums under the token weights. Every other metric is a mean over the tokens that were
# computed: samples that contribute nothing are not, and what they would have said is not known.
_SUMS = ("loss", "pg_loss", "entropy_loss", "kl_loss")
_WEIGHT = "computed_weight"
# Where a function of the user's wrote a response, no engine's log-probs are known: the drift is that of the others.
_DRIFT_WEIGHT = "drift_weight"
_DRIFT = ("mismatch_", "train_rollout_logprob_")


def forward_backward(model: Any, plan: StepPlan, algorithm: AlgorithmConfig, *, temperature: float) -> dict[str, float]:
    """Fill the gradient buffers with the gradient of the step's loss over all ranks.

    The loss is a sum over tokens under weights whose denominators are the whole step's, so neither the division
    into micro-batches nor that into ranks changes it. Megatron divides by both numbers; the loss is multiplied by
    them to take that back.

    Returns:
        The step's metrics, equal on all ranks.
    """
    device = next(model.parameters()).device
    mis_sums = step_mis_sums(plan, algorithm, device) if algorithm.needs_step_sums else None
    count = len(plan.micro_batches)
    if count == 0:
        finalize_model_grads([model])
        return step_metrics([])
    scale = count * parallel_state.get_data_parallel_world_size()

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(batches)
        log_probs_N, entropy_N = model(
            micro_batch.batch, temperature=temperature, with_entropy=algorithm.entropy_coef != 0
        )
        return log_probs_N, partial(_loss, micro_batch, plan.step, algorithm, scale, entropy_N, mis_sums)

    statistics = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(plan.micro_batches),
        model=[model],
        num_microbatches=count,
        seq_length=max(len(micro_batch.batch.tokens_T) for micro_batch in plan.micro_batches),
        micro_batch_size=1,
    )
    return step_metrics(statistics)


def _loss(
    micro_batch: MicroBatch,
    step: TrainStep,
    algorithm: AlgorithmConfig,
    scale: int,
    entropy_N: torch.Tensor | None,
    mis_sums: torch.Tensor | None,
    log_probs_N: torch.Tensor,
) -> tuple[torch.Tensor, Statistics]:
    """The micro-batch's share of the step's loss, times ``scale``, and its metrics."""
    old_log_probs_N = micro_batch.old_log_probs_N
    if old_log_probs_N is None:
        old_log_probs_N = log_probs_N.detach()
    weights_N = token_weights(micro_batch.batch, step, algorithm)
    loss, sums = policy_objective(
        algorithm,
        log_probs_T=log_probs_N,
        old_log_probs_T=old_log_probs_N,
        advantages_T=micro_batch.advantages_N,
        weights_T=weights_N,
        lengths=micro_batch.batch.target_lengths,
        ref_log_probs_T=micro_batch.ref_log_probs_N,
        rollout_log_probs_T=micro_batch.rollout_log_probs_N,
        entropy_T=entropy_N,
        mis_sums=mis_sums,
    )
    parts = [Statistics(sums={**sums, _WEIGHT: weights_N.sum()})]
    parts += _comparisons(micro_batch, algorithm, log_probs_N.detach(), old_log_probs_N, weights_N)
    return loss * scale, Statistics.merged(parts)


def token_weights(batch: PackedBatch, step: TrainStep, algorithm: AlgorithmConfig) -> torch.Tensor:
    """The weights of a micro-batch's trained tokens in the step's loss [N]."""
    return loss_weights(
        algorithm,
        [[1] * count for count in batch.target_lengths],
        trajectory_tokens=[sample.trajectory_tokens for sample in batch.samples],
        global_trajectories=step.global_trajectories,
        global_tokens=step.global_tokens,
        device=batch.targets_N.device,
    )


def step_mis_sums(plan: StepPlan, algorithm: AlgorithmConfig, device: torch.device) -> torch.Tensor:
    """:func:`slime_core.ops.mis_weight_sums` over the step and all data-parallel ranks, all of which call this [2]."""
    sums_2, flag = torch.zeros(2, device=device), "--mis-batch-normalize"
    for micro_batch in plan.micro_batches:
        batch = micro_batch.batch
        sums_2 += mis_weight_sums(
            algorithm,
            train_log_probs_T=needed(micro_batch.old_log_probs_N, flag, "the log-probs from before the update"),
            rollout_log_probs_T=needed(micro_batch.rollout_log_probs_N, flag, "the engine's log-probs"),
            mask_T=torch.ones_like(batch.targets_N),
            weights_T=token_weights(batch, plan.step, algorithm),
            lengths=batch.target_lengths,
        )
    dist.all_reduce(sums_2, group=parallel_state.get_data_parallel_group())
    return sums_2


def _comparisons(
    micro_batch: MicroBatch,
    algorithm: AlgorithmConfig,
    log_probs_N: torch.Tensor,
    old_log_probs_N: torch.Tensor,
    weights_N: torch.Tensor,
) -> list[Statistics]:
    """How far the policy has moved in this rollout, and how far the engine's log-probs are from the trainer's."""
    parts = []
    if micro_batch.old_log_probs_N is not None:
        parts.append(
            policy_statistics(
                log_probs_T=log_probs_N,
                old_log_probs_T=old_log_probs_N,
                advantages_T=micro_batch.advantages_N,
                mask_T=weights_N,
                weights_T=weights_N,
                eps_clip=algorithm.eps_clip,
                eps_clip_high=algorithm.clip_high,
                eps_clip_c=algorithm.eps_clip_c,
            )
        )
    if algorithm.use_opd:
        difference_N = old_log_probs_N - teacher_log_probs(micro_batch.batch.samples, old_log_probs_N.device)
        parts.append(Statistics(sums={"opd_reverse_kl": weighted_sum(difference_N, weights_N, weights_N)}))
    if micro_batch.rollout_log_probs_N is not None:
        drift = drift_statistics(
            train_log_probs_T=old_log_probs_N,
            rollout_log_probs_T=micro_batch.rollout_log_probs_N,
            mask_T=weights_N,
            weights_T=weights_N,
            lengths=micro_batch.batch.target_lengths,
        )
        if not algorithm.get_mismatch_metrics:
            name = "train_rollout_logprob_abs_diff"
            drift = Statistics(sums={name: drift.sums[name]}, maxima={name: drift.maxima[name]})
        parts += [drift, Statistics(sums={_DRIFT_WEIGHT: weights_N.sum()})]
    return parts


def step_metrics(parts: Sequence[Statistics]) -> dict[str, float]:
    """The statistics of micro-batches as metrics of the step, the same on all ranks. Called by every rank.

    Ranks may have had nothing to compute, so what they know is gathered by name.
    """
    gathered: list[Statistics] = [Statistics()] * parallel_state.get_data_parallel_world_size()
    own = _on_cpu(Statistics.merged(parts))
    dist.all_gather_object(gathered, own, group=parallel_state.get_data_parallel_group())
    metrics = {name: float(value) for name, value in Statistics.merged(gathered).metrics().items()}
    weight, drift_weight = metrics.pop(_WEIGHT, 0.0), metrics.pop(_DRIFT_WEIGHT, 0.0)
    for name in {name for part in gathered for name in part.sums} - {*_SUMS, _WEIGHT, _DRIFT_WEIGHT}:
        metrics[name] /= (drift_weight if name.startswith(_DRIFT) else weight) or 1.0
    return metrics


def _on_cpu(statistics: Statistics) -> Statistics:
    kinds = {kind.name: getattr(statistics, kind.name) for kind in fields(statistics)}
    return Statistics(**{kind: {name: value.cpu() for name, value in values.items()} for kind, values in kinds.items()})
