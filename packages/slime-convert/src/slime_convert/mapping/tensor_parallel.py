"""How Megatron splits one weight over its tensor-parallel ranks."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor


class TensorParallel(enum.Enum):
    """The split of a weight over tensor-parallel ranks."""

    REPLICATED = "every rank holds the whole"
    ROWS = "dimension 0"
    COLUMNS = "dimension 1"
    PAIRED_ROWS = "dimension 0 of each half: a rank holds [gate_r; up_r]"


def split(tensor: Tensor, how: TensorParallel, tp: int) -> list[Tensor]:
    """The ``tp`` shards of a whole tensor, in rank order; views where the split allows it.

    The split dimension (of each half, for ``PAIRED_ROWS``) must be a multiple of ``tp``.
    """
    if how is TensorParallel.REPLICATED:
        return [tensor] * tp
    if how is TensorParallel.PAIRED_ROWS:
        halves = [half.chunk(tp) for half in tensor.chunk(2)]
        return [torch.cat(pair) for pair in zip(*halves, strict=True)]
    return list(tensor.chunk(tp, dim=0 if how is TensorParallel.ROWS else 1))


def merge(shards: Sequence[Tensor], how: TensorParallel) -> Tensor:
    """The whole tensor from its shards in rank order; the inverse of :func:`split`."""
    if how is TensorParallel.REPLICATED or len(shards) == 1:
        return shards[0]
    if how is TensorParallel.PAIRED_ROWS:
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([torch.cat(half) for half in halves])
    return torch.cat(list(shards), dim=0 if how is TensorParallel.ROWS else 1)
