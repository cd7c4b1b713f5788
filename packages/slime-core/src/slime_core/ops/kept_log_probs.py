"""Log-probs and entropies over kept tokens alone: the distribution that top-p, top-k or min-p sampled from.

An engine that samples from a part of the vocabulary draws from softmax over that part. Where the trainer normalizes
over the same part, ratios of probabilities are right; over the whole vocabulary, they would be off by the kept mass.

Only the logits of kept tokens are computed, from hidden states: as many products of vectors as there are kept tokens.

Shapes: T tokens, D hidden size, V rows of the weight on this rank, K kept tokens of all T together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_core.errors import DataError
from slime_core.ops.log_probs import accumulation_dtype, check_temperature
from slime_core.ops.tokens import may_look

# Elements of rows that are gathered at a time.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}


def kept_log_probs_and_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    kept_ids_K: Tensor,
    kept_counts_T: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax`` over each token's kept ids of ``hidden @ weightᵀ / temperature``, at the targets.

    Computed in fp32 (fp64 for fp64 inputs). A group is used once in the forward pass, and once in the backward pass if
    the hidden states need a gradient.

    Args:
        hidden_TD: Hidden states [T, D]; in a group the same on all ranks.
        weight_VD: Output weight [V, D] of the same type. In a group, rank r holds the rows [r·V, (r+1)·V).
        targets_T: Token ids [T], each among its kept ids.
        kept_ids_K: Ids [K], whole-vocabulary numbers, each token's after those of the token before it; no id twice.
        kept_counts_T: How many of them each token has [T].
        temperature: The logits are divided by it.
        group: Tensor-parallel group over which the weight's rows are split; ``None`` if they are all here.
        with_entropy: Compute entropies too.

    Returns:
        Log-probs [T] in nats, and entropies [T] in nats of the same distribution or ``None``; the same on all ranks.
        The gradient of the hidden states is that of all kept tokens on all ranks, the weight's that of the rank's rows.

    Raises:
        ConfigError: The temperature is not above 0.
        DataError: Shapes or types do not match; on a CPU also a target that is not among its kept ids (elsewhere, where
            looking would stall the device, its log-prob is NaN).
    """
    check_temperature(temperature)
    _check_shapes(hidden_TD, weight_VD, targets_T, kept_ids_K, kept_counts_T)
    ids_K, counts_T = kept_ids_K.long(), kept_counts_T.long()
    rows_K = torch.repeat_interleave(
        torch.arange(len(targets_T), device=ids_K.device), counts_T, output_size=len(ids_K)
    )
    logits_K: Tensor = _KeptLogits.apply(hidden_TD, weight_VD, rows_K, ids_K, group)  # type: ignore[no-untyped-call]
    scaled_K = logits_K / temperature
    zeros_T = scaled_K.new_zeros(len(targets_T))
    top_T = zeros_T.scatter_reduce(0, rows_K, scaled_K.detach(), "amax", include_self=False)
    shifted_K = scaled_K - top_T[rows_K]
    exp_K = shifted_K.exp()
    total_T = zeros_T.index_add(0, rows_K, exp_K)
    is_target_K = ids_K == targets_T[rows_K]
    found_T = torch.zeros_like(counts_T).index_add(0, rows_K, is_target_K.long())
    if may_look(found_T) and not bool((found_T == 1).all()):
        at = int((found_T != 1).nonzero()[0])
        raise DataError(
            f"target {int(targets_T[at])} (place {at}) is {int(found_T[at])} times among its {int(counts_T[at])} kept "
            "tokens; it must be there once"
        )
    target_T = zeros_T.index_add(0, rows_K, shifted_K * is_target_K)
    log_probs_T = (target_T - total_T.log()).masked_fill(found_T != 1, torch.nan)
    if not with_entropy:
        return log_probs_T, None
    return log_probs_T, total_T.log() - zeros_T.index_add(0, rows_K, exp_K * shifted_K) / total_T


def _check_shapes(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ids_K: Tensor, counts_T: Tensor) -> None:
    good = hidden_TD.dim() == 2 and weight_VD.dim() == 2 and hidden_TD.shape[1] == weight_VD.shape[1]
    if not good or targets_T.shape != hidden_TD.shape[:1] or counts_T.shape != targets_T.shape or ids_K.dim() != 1:
        raise DataError(
            "hidden states must be [tokens, hidden], the weight [vocabulary, hidden], targets and kept_counts [tokens] "
            f"and kept_ids [kept]; got {list(hidden_TD.shape)}, {list(weight_VD.shape)}, {list(targets_T.shape)}, "
            f"{list(counts_T.shape)} and {list(ids_K.shape)}"
        )
    if hidden_TD.dtype != weight_VD.dtype:
        raise DataError(f"hidden states are {hidden_TD.dtype} and the weight {weight_VD.dtype}; cast one of them")
    if may_look(counts_T) and int(counts_T.sum()) != len(ids_K):
        raise DataError(f"kept_counts add up to {int(counts_T.sum())}, and there are {len(ids_K)} kept_ids")


class _KeptLogits(torch.autograd.Function):
    """One logit for each kept token. What is kept for the backward pass is the inputs."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, rows_K: Tensor, ids_K: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        first = 0 if group is None else dist.get_rank(group) * len(weight_VD)
        own_K = (ids_K >= first) & (ids_K < first + len(weight_VD))
        # A rank of several takes its own kept tokens alone.
        places_K = None if group is None else own_K.nonzero().squeeze(1)
        rows_K, local_K = (rows_K, ids_K) if places_K is None else (rows_K[places_K], ids_K[places_K] - first)
        logits_K = hidden_TD.new_empty(len(rows_K), dtype=accumulation_dtype(hidden_TD.dtype))
        for part in _parts(hidden_TD, len(rows_K)):
            logits_K[part] = (_wide(hidden_TD, rows_K[part]) * _wide(weight_VD, local_K[part])).sum(-1)
        if group is not None and places_K is not None:
            logits_K = logits_K.new_zeros(len(ids_K)).index_copy_(0, places_K, logits_K)
            dist.all_reduce(logits_K, group=group)
        ctx.save_for_backward(hidden_TD, weight_VD, rows_K, local_K, places_K)
        ctx.group = group
        return logits_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, rows_K, local_K, places_K = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if places_K is not None:
            grad_K = grad_K[places_K]
        hidden_sum_TD = torch.zeros_like(hidden_TD, dtype=grad_K.dtype) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD) if needs_weight else None
        if hidden_sum_TD is not None:
            for part in _parts(hidden_TD, len(rows_K)):
                products_KD = grad_K[part].unsqueeze(1) * _wide(weight_VD, local_K[part])
                hidden_sum_TD.index_add_(0, rows_K[part], products_KD)
            if ctx.group is not None:
                dist.all_reduce(hidden_sum_TD, group=ctx.group)
        if grad_weight_VD is not None:
            # By id, so that what belongs to a row of the weight is added up in fp32 before it is rounded.
            order_K = local_K.argsort(stable=True)
            for part in _parts(hidden_TD, len(rows_K)):
                at_K = order_K[part]
                ids_U, inverse_K = torch.unique_consecutive(local_K[at_K], return_inverse=True)
                sums_UD = hidden_TD.new_zeros(len(ids_U), hidden_TD.shape[1], dtype=grad_K.dtype)
                sums_UD.index_add_(0, inverse_K, grad_K[at_K].unsqueeze(1) * _wide(hidden_TD, rows_K[at_K]))
                grad_weight_VD.index_add_(0, ids_U, sums_UD.to(weight_VD.dtype))
        grad_hidden_TD = None if hidden_sum_TD is None else hidden_sum_TD.to(hidden_TD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def _parts(hidden_TD: Tensor, count: int) -> Iterator[slice]:
    elements = _CHUNK_ELEMENTS.get(hidden_TD.device.type, _CHUNK_ELEMENTS["cuda"])
    size = max(1, elements // max(hidden_TD.shape[1], 1))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _wide(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table, in the type that sums are computed in."""
    return table.index_select(0, rows).to(accumulation_dtype(table.dtype))
