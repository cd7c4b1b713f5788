"""Megatron's schedule over micro-batches: a train step, and log-probs without gradient.

Notation: T packed tokens, D hidden channels, N trained tokens, M of them that this context-parallel rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_core.config import AlgorithmConfig
from slime_core.ops import (
    Statistics,
    kept_log_probs_and_entropy,
    linear_log_probs_and_entropy,
    loss_weights,
    mis_weight_sums,
    reducer_weights,
)
from slime_core.ops.tokens import needed
from slime_core.types import TrainStep
from slime_megatron.model.build import Chunks, bare, output_weight, run
from slime_megatron.model.packing import MicroBatch, PackedBatch, target_values
from slime_megatron.model.routing import changed, forget
from slime_megatron.ranks.exchange import broadcast_value, gather_values
from slime_megatron.step.losses import DRIFT_WEIGHT, LossFunction, LossInputs
from slime_megatron.step.pairs import margins
from slime_megatron.step.plan import PlannedBatch, StepPlan

Packed = Callable[[int], Iterator[PackedBatch]]
"""Gives the micro-batches on the device, each packed when it is asked for; called with the number of each chunk."""

# The loss and its terms are sums under the token weights. Every other metric is a mean over the tokens, or the pairs,
# that were computed: samples that contribute nothing are not, and what they would have given is unknown.
_SUMS = ("loss", "pg_loss", "entropy_loss", "kl_loss", "value_loss")
_WEIGHT = "computed_weight"
_DRIFT = ("mismatch_", "train_rollout_")


class Reader(Protocol):
    """From what the last chunk gives to the targets' numbers and entropies: :class:`Head`, or :func:`read_values`."""

    def __call__(
        self, chunk: Any, given: torch.Tensor, batch: PackedBatch, /, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Numbers of the targets [N], and entropies [N] if wanted and there are any."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """From the last stage's hidden states to log-probs (nats): the vocabulary without its padding, the temperature."""

    vocab_size: int
    temperature: float

    def __call__(
        self, chunk: Any, hidden_1TD: torch.Tensor, batch: PackedBatch, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of the targets [N], and entropies [N] if wanted; equal on tensor- and context-parallel ranks.

        Both are over the tokens kept in sampling, where the samples say which.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        hidden_MD, weight = hidden_1TD[0].index_select(0, batch.logit_rows_M), output_weight(chunk)
        how: dict[str, Any] = {"temperature": self.temperature, "with_entropy": with_entropy}
        how |= {"group": group if group.size() > 1 else None}
        if (kept := batch.kept) is not None:
            found = kept_log_probs_and_entropy(hidden_MD, weight, batch.targets_M, kept.ids, kept.counts, **how)
        else:
            found = linear_log_probs_and_entropy(hidden_MD, weight, batch.targets_M, vocab_size=self.vocab_size, **how)
        log_probs_M, entropy_M = found
        return _whole(log_probs_M, batch), None if entropy_M is None else _whole(entropy_M, batch)


def read_values(
    chunk: Any, values_1T1: torch.Tensor, batch: PackedBatch, *, with_entropy: bool = False
) -> tuple[torch.Tensor, None]:
    """A value head's numbers at the targets [N], equal on tensor- and context-parallel ranks, and no entropies."""
    return _whole(values_1T1[0, :, 0].index_select(0, batch.logit_rows_M), batch), None


def _whole(values_M: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The values of all context-parallel ranks [N]; the gradient goes to this rank's."""
    if batch.places_M is None:
        return values_M
    values_N = values_M.new_zeros(batch.num_targets).index_put((batch.places_M,), values_M)
    summed: torch.Tensor = _SumOfRanks.apply(values_N)  # type: ignore[no-untyped-call]
    return summed


class _SumOfRanks(torch.autograd.Function):
    """A sum over the context-parallel ranks; all of them then compute the same loss."""

    @staticmethod
    def forward(ctx: Any, values_N: torch.Tensor) -> torch.Tensor:
        summed_N = values_N.clone()
        dist.all_reduce(summed_N, group=parallel_state.get_context_parallel_group())
        return summed_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> torch.Tensor:
        return grad_N


@torch.no_grad()
def forward_values(model: Chunks, packed: Packed, batches: Sequence[MicroBatch], head: Reader) -> list[torch.Tensor]:
    """Log-probs (nats) of the targets of each micro-batch [N], without gradient, on all ranks."""

    def forward_step(batches: Iterator[PackedBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        batch = next(batches)
        return run(chunk, batch), lambda hidden_1TD, non_loss_data: head(chunk, hidden_1TD, batch)[0]

    found = _schedule(forward_step, packed, model, len(batches), forward_only=True, collect_non_loss_data=True)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or not batches:
        return found
    counts = [sum(batch.target_lengths) for batch in batches]
    device = next(bare(model[0]).parameters()).device
    values = torch.cat(found) if found else torch.empty(sum(counts), device=device)
    dist.broadcast(values, *_from_last_stage())
    return list(torch.split(values, counts))


def forward_backward(
    model: Chunks,
    plan: StepPlan,
    packed: Packed,
    loss: LossFunction,
    algorithm: AlgorithmConfig,
    head: Reader,
    *,
    forward_only: bool = False,
    see: Callable[[PlannedBatch, torch.Tensor], None] | None = None,
) -> dict[str, float]:
    """Fill the gradient buffers with the gradient of the step's loss over all ranks.

    The loss is a sum over tokens under weights whose denominators are the whole step's, so neither the division
    into micro-batches nor that into ranks changes it. Megatron divides by both numbers; the loss is multiplied by
    them to take that back. Returns the step's metrics, equal on all ranks. With ``forward_only`` the buffers stay.
    ``see`` is given each micro-batch with its log-probs [N], on the last stage.
    """
    mis_sums = None
    if algorithm.uses_advantages and algorithm.needs_step_sums:
        mis_sums = step_mis_sums(plan, algorithm, next(bare(model[0]).parameters()).device)
    count = len(plan.batches)
    if count == 0:  # on all ranks
        if not forward_only:
            _start_reducing(model)
            finalize_model_grads(model)
        return step_metrics([])
    scale = count * parallel_state.get_data_parallel_world_size()
    planned = iter(plan.batches)

    def forward_step(batches: Iterator[PackedBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)

        def loss_of(hidden_1TD: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
            output_N, entropy_N = head(chunk, hidden_1TD, batch, with_entropy=algorithm.entropy_coef != 0)
            one = next(planned)
            if see is not None:
                see(one, output_N)
            return _loss(loss, one, plan.step, algorithm, scale, entropy_N, mis_sums, output_N)

        return run(chunk, batch), loss_of

    metrics = step_metrics(_schedule(forward_step, packed, model, count, forward_only=forward_only))
    return metrics | changed([bare(chunk) for chunk in model])


def _start_reducing(model: Chunks) -> None:
    """Start reducing gradients, as backward passes do with overlap, but for the first, which reduces at its end."""
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if chunk.ddp_config.overlap_grad_reduce and not group.is_first_batch:
                group.start_grad_sync()


def _schedule(forward_step: Any, packed: Packed, model: Chunks, count: int, **how: bool) -> list[Any]:
    """Run Megatron's schedule; what the loss function gave for each micro-batch, on the last stage."""
    if count == 0:
        return []
    for chunk in model:
        forget(bare(chunk))
    iterators = [packed(number) for number in range(len(model))]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=model,
        num_microbatches=count,
        seq_length=1,  # micro-batches differ in length: stages tell each other
        micro_batch_size=1,
        **how,
    )
    return results


def _from_last_stage() -> tuple[int, Any]:
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    return last, parallel_state.get_pipeline_model_parallel_group()


def _loss(
    loss: LossFunction,
    planned: PlannedBatch,
    step: TrainStep,
    algorithm: AlgorithmConfig,
    scale: int,
    entropy_N: torch.Tensor | None,
    mis_sums: torch.Tensor | None,
    output_N: torch.Tensor,
) -> tuple[torch.Tensor, Statistics]:
    """The micro-batch's share of the step's loss, times ``scale``, and its metrics."""
    batch, device = planned.batch, output_N.device
    if not batch.samples:
        return output_N.sum(), Statistics()  # 0, with a gradient of 0 for every parameter
    weights_N = token_weights(batch, step, algorithm, device)
    global_pairs = step.global_trajectories // 2
    value, statistics = loss(
        LossInputs(
            algorithm=algorithm,
            output_N=output_N,
            weights_N=weights_N,
            lengths=batch.target_lengths,
            entropy_N=entropy_N,
            mis_sums=mis_sums,
            pg_weights_N=reducer_weights(
                algorithm,
                torch.ones(sum(batch.target_lengths), device=device),
                list(batch.target_lengths),
                global_trajectories=step.global_trajectories,
                global_tokens=step.global_tokens,
            ),
            global_pairs=global_pairs,
            margins_P=margins(batch.samples).to(device) if loss.pairs else None,
            **planned.known(device),
        )
    )
    weight = weights_N.new_tensor(len(batch.samples) / 2 / global_pairs) if loss.pairs else weights_N.sum()
    return value * scale, Statistics.merged([statistics, Statistics(sums={_WEIGHT: weight})])


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
        rollout_N = needed(target_values(batch.samples, "rollout_log_probs"), flag, "the engine's log-probs")
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
    values = gather_values(_as_values(Statistics.merged(parts)), parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        values = broadcast_value(values, *_from_last_stage())
    gathered = [_from_values(part) for part in values]
    metrics = {name: float(value) for name, value in Statistics.merged(gathered).metrics().items()}
    weight, drift_weight = metrics.pop(_WEIGHT, 0.0), metrics.pop(DRIFT_WEIGHT, 0.0)
    for name in {name for part in gathered for name in part.sums} - {*_SUMS, _WEIGHT, DRIFT_WEIGHT}:
        metrics[name] /= (drift_weight if name.startswith(_DRIFT) else weight) or 1.0
    return metrics


def _as_values(statistics: Statistics) -> dict[str, dict[str, Any]]:
    """The statistics as values that ranks can tell each other: by kind and name, the type and the numbers."""
    kinds = {kind.name: getattr(statistics, kind.name) for kind in fields(statistics)}
    return {
        kind: {name: (str(value.dtype).removeprefix("torch."), value.tolist()) for name, value in values.items()}
        for kind, values in kinds.items()
    }


def _from_values(kinds: dict[str, dict[str, Any]]) -> Statistics:
    """The statistics of :func:`_as_values`, on the host."""
    found = {}
    for kind, values in kinds.items():
        found[kind] = {name: torch.tensor(one, dtype=getattr(torch, dtype)) for name, (dtype, one) in values.items()}
    return Statistics(**found)
