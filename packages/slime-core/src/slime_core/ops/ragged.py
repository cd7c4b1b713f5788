"""Sums and means over sequences that lie one after the other in a flat tensor: T tokens of N sequences.

No padding: ``lengths`` holds N numbers that add up to T, and a length may be 0. Under context parallelism each rank of
a group has some tokens of the same N sequences, in the same order of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.errors import DataError


def lengths_tensor(lengths: Sequence[int] | Tensor, total: int, device: torch.device | str | None = None) -> Tensor:
    """The lengths as int64 [N], checked.

    Args:
        lengths: N numbers, 0 or more.
        total: T, what they must add up to.
        device: Device of the result.

    Raises:
        DataError: A length is negative or not a whole number, or they add up to something else.
    """
    given_N = torch.as_tensor(lengths)
    lengths_N = given_N.to(torch.int64)
    if lengths_N.dim() != 1 or bool((lengths_N < 0).any()) or bool((lengths_N != given_N).any()):
        raise DataError(f"lengths must be whole numbers of 0 or more, one per sequence; got {given_N.tolist()}")
    if int(lengths_N.sum()) != total:
        raise DataError(f"lengths add up to {int(lengths_N.sum())} but there are {total} tokens")
    return lengths_N.to(device)


def sequence_sum(values_T: Tensor, lengths_N: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over each sequence [N]; 0 for an empty one. Differentiable.

    Args:
        values_T: Floating-point numbers [T].
        lengths_N: From :func:`lengths_tensor`, on the same device.
        group: Ranks that hold the other tokens of the same sequences; every one of them must call this. ``None`` if the
            sequences are here whole.
    """
    sums_N = torch.segment_reduce(values_T, "sum", lengths=lengths_N, axis=0, unsafe=True, initial=0)
    if group is None:
        return sums_N
    total_N: Tensor = _SumOverRanks.apply(sums_N, group)  # type: ignore[no-untyped-call]
    return total_N


def sequence_mean(
    values_T: Tensor, mask_T: Tensor, lengths_N: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Mean over each sequence's tokens with mask 1 [N]; 0 where there is none. Differentiable.

    Args:
        values_T: Floating-point numbers [T]. What is masked may be anything, NaN too, and gets no gradient.
        mask_T: 1 where a token counts, else 0 [T].
        lengths_N: From :func:`lengths_tensor`, on the same device.
        group: As in :func:`sequence_sum`.
    """
    counted_T = values_T.masked_fill(mask_T == 0, 0)
    count_N = sequence_sum(mask_T.to(values_T.dtype), lengths_N, group)
    return sequence_sum(counted_T, lengths_N, group) / count_N.clamp(min=1)


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' numbers, on each of them. Every rank's loss depends on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total_N = values_N.clone()
        dist.all_reduce(total_N, group=group)
        return total_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        total_N = grad_N.contiguous().clone()
        dist.all_reduce(total_N, group=ctx.group)
        return total_N, None


def expand(values_N: Tensor, lengths_N: Tensor) -> Tensor:
    """Each sequence's number at each of its tokens [T]. Differentiable.

    Args:
        values_N: One number per sequence [N].
        lengths_N: From :func:`lengths_tensor`, on the same device.
    """
    return values_N.repeat_interleave(lengths_N)
