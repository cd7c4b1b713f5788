"""One optimizer step: plan its micro-batches, run Megatron's schedule over them, update the weights.

Notation: N trained response tokens of a micro-batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.config import AlgorithmConfig
from slime_core.ops import grpo_advantages, log_probs_and_entropy, policy_objective, token_weights
from slime_core.types import TrainSample, TrainStep
from slime_megatron.packing import PackedBatch

# Largest values over the step; every other metric is a sum over micro-batches and ranks.
MAX_METRICS = ("train_rollout_logprob_abs_diff_max",)


@dataclass
class MicroBatch:
    """A packed micro-batch and the log-probs that its loss compares with.

    Attributes:
        batch: The packed samples.
        old_log_probs_N: Log-probs under the weights that the rollout's first step started from; ``None`` for the
            current ones.
        ref_log_probs_N: Log-probs under the reference model, if the loss needs them.
    """

    batch: PackedBatch
    old_log_probs_N: torch.Tensor | None = None
    ref_log_probs_N: torch.Tensor | None = None


@dataclass
class StepPlan:
    """One optimizer step of one rank, packed."""

    step: TrainStep
    micro_batches: list[MicroBatch] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that one pass over the step computes on this rank."""
        return sum(micro_batch.batch.computed_tokens for micro_batch in self.micro_batches)


def contributes(sample: TrainSample, algorithm: AlgorithmConfig) -> bool:
    """Whether a sample adds anything to the loss or its gradient.

    Without a trained token it does not; nor does it with a zero advantage, unless the KL loss or the entropy bonus
    wants it.
    """
    return any(sample.loss_mask) and (sample.reward != 0 or algorithm.use_kl_loss or algorithm.entropy_coef != 0)


def log_probs(
    model: Any, batch: PackedBatch, *, temperature: float, vocab_size: int, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs (and entropies) of a batch's targets under ``model``; the same on all tensor-parallel ranks."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return log_probs_and_entropy(
        model(batch),
        batch.targets_N,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group() if tensor_parallel else None,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
    )


def forward_backward(
    model: Any, plan: StepPlan, algorithm: AlgorithmConfig, *, temperature: float, vocab_size: int
) -> dict[str, float]:
    """Fill the gradient buffers with the gradient of the step's loss over all ranks.

    The loss is a sum over tokens under weights whose denominators are the whole step's, so neither the division
    into micro-batches nor that into ranks changes it. Megatron divides by both numbers; the loss is multiplied by
    them to take that back.

    Returns:
        The step's metrics, equal on all ranks.
    """
    count = len(plan.micro_batches)
    if count == 0:
        finalize_model_grads([model])
        return reduce_metrics([])
    scale = count * parallel_state.get_data_parallel_world_size()

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(batches)
        log_probs_N, entropy_N = log_probs(
            model,
            micro_batch.batch,
            temperature=temperature,
            vocab_size=vocab_size,
            with_entropy=algorithm.entropy_coef != 0,
        )
        return log_probs_N, partial(_loss, micro_batch, plan.step, algorithm, scale, entropy_N)

    metrics = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(plan.micro_batches),
        model=[model],
        num_microbatches=count,
        seq_length=max(len(micro_batch.batch.tokens_T) for micro_batch in plan.micro_batches),
        micro_batch_size=1,
    )
    return reduce_metrics(metrics)


def _loss(
    micro_batch: MicroBatch,
    step: TrainStep,
    algorithm: AlgorithmConfig,
    scale: int,
    entropy_N: torch.Tensor | None,
    log_probs_N: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The micro-batch's share of the step's loss, times ``scale``, and its metrics."""
    batch = micro_batch.batch
    device = log_probs_N.device
    old_log_probs_N = micro_batch.old_log_probs_N
    if old_log_probs_N is None:
        old_log_probs_N = log_probs_N.detach()
    pairs = zip(batch.samples, batch.target_lengths, strict=True)
    loss, metrics = policy_objective(
        algorithm,
        log_probs_T=log_probs_N,
        old_log_probs_T=old_log_probs_N,
        advantages_T=torch.cat([grpo_advantages(sample.reward, count, device=device) for sample, count in pairs]),
        weights_T=token_weights(
            [[1] * count for count in batch.target_lengths],
            global_samples=step.global_samples,
            global_tokens=step.global_tokens,
            per_token=algorithm.calculate_per_token_loss,
            device=device,
        ),
        ref_log_probs_T=micro_batch.ref_log_probs_N,
        entropy_T=entropy_N,
    )
    return loss * scale, {**metrics, **_engine_difference(batch, log_probs_N.detach())}


def _engine_difference(batch: PackedBatch, log_probs_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far the engine's log-probs are from the trainer's: summed, counted and at most."""
    rollout = [sample.rollout_log_probs for sample in batch.samples]
    if any(values is None for values in rollout):
        return {}
    difference_N = (log_probs_N - batch.trained([values for values in rollout if values is not None])).abs()
    return {
        "train_rollout_logprob_abs_diff": difference_N.sum(),
        "train_rollout_logprob_count": torch.tensor(float(len(difference_N)), device=difference_N.device),
        "train_rollout_logprob_abs_diff_max": difference_N.max(),
    }


def reduce_metrics(metrics: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches, combined over them and over the data-parallel ranks. Called by every rank."""
    local: dict[str, float] = {}
    for row in metrics:
        for name, value in row.items():
            number = float(value)
            if name in MAX_METRICS:
                local[name] = max(local.get(name, number), number)
            else:
                local[name] = local.get(name, 0.0) + number
    gathered: list[dict[str, float]] = [{}] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(gathered, local, group=parallel_state.get_data_parallel_group())
    total: dict[str, float] = {}
    for part in gathered:
        for name, number in part.items():
            combine = max if name in MAX_METRICS else operator.add
            total[name] = combine(total[name], number) if name in total else number
    tokens = total.pop("train_rollout_logprob_count", 0.0)
    if tokens:
        total["train_rollout_logprob_abs_diff"] /= tokens
    return total
