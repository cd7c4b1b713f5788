"""Whitening over the trained tokens of all ranks. T tokens of this rank; W ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.errors import ConfigError, DataError
from slime_core.ops.scan import check_tokens


@torch.no_grad()
def whiten(values_T: Tensor, mask_T: Tensor, *, group: dist.ProcessGroup | None = None, eps: float = 1e-8) -> Tensor:
    """``(x − μ) / sqrt(σ² + eps)`` over the tokens with mask 1 of every rank in the group.

    μ is the mean over those tokens and σ² their variance with Bessel's correction (n − 1), 0 for a single token. Each
    rank's count, mean and sum of squared deviations are put together as in Chan et al. 1983 (pairwise update), so that
    neither a large mean nor the way tokens fall to ranks costs accuracy.

    One collective, in which **every rank of the group must take part**, with no tokens too. The group is the
    data-parallel ranks, times the context-parallel ones where those split the tokens; ranks that hold the same tokens
    (tensor and pipeline parallelism) belong to different groups. All tokens of a rollout go in at once.

    Args:
        values_T: Numbers to whiten, such as advantages [T]; T may be 0 and differ between ranks. What is masked may be
            anything, NaN too.
        mask_T: 1 where a token counts, else 0 [T].
        group: Ranks that share the statistics. ``None`` means this process alone.
        eps: Added to the variance, above 0: equal numbers have none.

    Returns:
        Whitened numbers [T], 0 where masked, without gradient; in the values' type or, below that, float32.

    Raises:
        ConfigError: ``eps`` is not a finite number above 0.
        DataError: The shapes differ; or a number that counts is not finite on some rank, and then on every rank, so
            that none waits for another.
    """
    if not 0 < eps < math.inf:
        raise ConfigError(f"eps {eps} must be a finite number above 0; 1e-8 is usual")
    check_tokens(len(mask_T), mask_T=mask_T, values_T=values_T)
    kept_T = mask_T != 0
    numbers_T = values_T.detach().double().masked_fill(~kept_T, 0)
    count = kept_T.sum().double()
    mean = numbers_T.sum() / count.clamp(min=1)
    squares = (numbers_T - mean).masked_fill_(~kept_T, 0).square_().sum()
    count_W, mean_W, squares_W = _gather(torch.stack([count, mean, squares]), group).unbind(1)
    total = count_W.sum()
    mean = (count_W * mean_W).sum() / total.clamp(min=1)
    variance = (squares_W + count_W * (mean_W - mean).square()).sum() / (total - 1).clamp(min=1)
    if not bool(variance.isfinite()):
        raise DataError(
            "numbers to whiten must be finite where the mask is 1, and their squares too; the sums of squared "
            f"deviations on the ranks of the group are {squares_W.tolist()}: mask such numbers or mend them"
        )
    whitened_T = (numbers_T - mean).mul_((variance + eps).rsqrt()).masked_fill_(~kept_T, 0)
    return whitened_T.to(torch.promote_types(values_T.dtype, torch.float32))


def _gather(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Each rank's numbers, one row per rank."""
    if group is None:
        return numbers.unsqueeze(0)
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, numbers, group=group)
    return torch.stack(rows)
