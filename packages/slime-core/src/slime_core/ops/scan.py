"""The recurrence behind discounted returns and generalised advantages, for all tokens at once.

T tokens of N sequences; C chunks of L steps, P = C · L places.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slime_core.errors import DataError

CHUNK = 48
"""Most steps in a chunk: the more, the more multiplications per token and the fewer levels of chunks."""


CPU_BLOCK = 2**17
"""Tokens that a CPU works on at a time: so few that its caches hold them, and that the allocator keeps the memory."""


def blocks(lengths_N: Tensor) -> list[tuple[slice, slice]]:
    """Whole sequences to work on at a time, as tokens and sequences: all at once unless on a CPU.

    A block has ``CPU_BLOCK`` tokens at most, or a single longer sequence.
    """
    count = len(lengths_N)
    ends_N = lengths_N.cumsum(0)
    total = int(ends_N[-1]) if count else 0
    limit = CPU_BLOCK if lengths_N.device.type == "cpu" else total
    result, token, sequence = [], 0, 0
    while sequence < count:
        stop = max(int(torch.searchsorted(ends_N, token + limit, right=True)), sequence + 1)
        end = int(ends_N[stop - 1])
        result.append((slice(token, end), slice(sequence, stop)))
        token, sequence = end, stop
    return result


class Chunks(NamedTuple):
    """Where trained tokens stand when each sequence's begin a chunk, close ranks and are followed by a zero or more.

    Attributes:
        place_T: Each token's place among the P; P itself for a token that is masked.
        count_N: Chunks per sequence.
        size: L.
    """

    place_T: Tensor
    count_N: Tensor
    size: int

    @classmethod
    def of(cls, lengths_N: Tensor, mask_T: Tensor) -> Chunks:
        """Lay out sequences.

        Args:
            lengths_N: From :func:`slime_core.ops.ragged.lengths_tensor`.
            mask_T: Not 0 where a token is trained.
        """
        total = len(mask_T)
        kept_T = None if int(mask_T.count_nonzero()) == total else mask_T != 0
        starts_N = lengths_N.cumsum(0) - lengths_N
        trained_N = lengths_N
        step_T = torch.ones(total + 1, dtype=torch.int64, device=lengths_N.device)
        if kept_T is not None:
            step_T[:-1] = kept_T
            before = torch.cat([lengths_N.new_zeros(1), step_T[:-1].cumsum(0)])
            trained_N = before[starts_N + lengths_N] - before[starts_N]
        size = min(CHUNK, 1 + int(trained_N.max())) if len(trained_N) else 1
        count_N = trained_N // size + 1
        # A token is one place behind the last trained one; where a sequence starts, that many more.
        skipped_N = (count_N.cumsum(0) - count_N) * size - (trained_N.cumsum(0) - trained_N)
        step_T.index_add_(0, starts_N, skipped_N.diff(prepend=skipped_N.new_ones(1)))
        place_T = step_T.cumsum_(0)[:-1]
        if kept_T is not None:
            place_T = torch.where(kept_T, place_T, count_N.sum() * size)
        return cls(place_T, count_N, size)

    def put(self, values_T: Tensor) -> Tensor:
        """Values at their places, zeros elsewhere, without gradient, float64 [C, L]."""
        places = int(self.count_N.sum()) * self.size
        row = torch.zeros(places + 1, dtype=torch.float64, device=values_T.device)
        row.scatter_(0, self.place_T, values_T.detach().double())
        return row[:places].view(-1, self.size)

    def put_finite(self, name: str, values_T: Tensor, first: int = 0) -> Tensor:
        """:meth:`put`, checked.

        Args:
            name: What the values are called.
            values_T: The values.
            first: The caller's number of the first of these tokens.

        Raises:
            DataError: A trained token's value is NaN or infinite; names the token.
        """
        values_CL = self.put(values_T)
        # One sum is quicker than a look at each token, and only where it overflows for nothing are both taken.
        if not math.isfinite(float(values_CL.sum())):
            check_finite(name, values_T.masked_fill(self.place_T == values_CL.numel(), 0), first)
        return values_CL

    def take(self, values_CL: Tensor, result_T: Tensor) -> Tensor:
        """Write the tokens' values, 0 for a masked token, to ``result_T``, in its type."""
        row = torch.empty(values_CL.numel() + 1, dtype=result_T.dtype, device=values_CL.device)
        row[:-1] = values_CL.view(-1)
        row[-1] = 0
        return torch.index_select(row, 0, self.place_T, out=result_T)

    def add_following(self, target_CL: Tensor, values_CL: Tensor, factor: float) -> Tensor:
        """Add, in place, ``factor`` times the value of the next token in the sequence, or 0 where there is none."""
        row = target_CL.view(-1)
        row[:-1].add_(values_CL.view(-1)[1:], alpha=factor)
        row[self.count_N.cumsum(0) * self.size - 1] = 0  # always an empty place; its next is another sequence's
        return target_CL

    def reverse_scan(self, inputs_CL: Tensor, decay: float) -> Tensor:
        """``y_t = x_t + decay · y_{t+1}`` within each sequence.

        Instead of T steps in a row: every chunk is a row of one product with the powers of ``decay``. What a chunk
        takes over from the next one follows the same recurrence, with ``decay ** L``, over the chunks; and so on, until
        each sequence is one chunk. In float64, which neither TF32 nor autocast touches.

        Args:
            inputs_CL: x at its places; finite, since what a chunk holds mixes.
            decay: 0 to 1.

        Returns:
            y at its places [C, L].
        """
        step = torch.arange(self.size, device=inputs_CL.device)
        powers = decay ** torch.arange(self.size + 1, dtype=inputs_CL.dtype, device=inputs_CL.device)
        distance_LL = step.unsqueeze(1) - step
        outputs_CL = inputs_CL @ torch.where(distance_LL >= 0, powers[distance_LL.clamp(min=0)], 0.0)
        if self.size == CHUNK:
            chunks = Chunks.of(self.count_N, torch.ones_like(outputs_CL[:, 0], dtype=torch.bool))
            heads = chunks.reverse_scan(chunks.put(outputs_CL[:, 0]), float(powers[-1]))
            following = chunks.add_following(torch.zeros_like(heads), heads, 1.0)
            carry_C = chunks.take(following, heads.new_empty(len(outputs_CL)))
            outputs_CL.addcmul_(carry_C.unsqueeze(1), powers[1:].flip(0))
        return outputs_CL


def check_tokens(total: int, **tensors_T: Tensor) -> None:
    """Check that tensors hold one number per token.

    Raises:
        DataError: One has another shape; names it.
    """
    for name, tensor in tensors_T.items():
        if tensor.shape != (total,):
            raise DataError(f"{name} has shape {list(tensor.shape)}, must be [{total}]: one number per token")


def check_finite(name: str, values_T: Tensor, first: int = 0) -> None:
    """Check that what the mask left is finite.

    Args:
        name: What the values are called.
        values_T: The values.
        first: The caller's number of the first of these tokens.

    Raises:
        DataError: It is not; names the first token and counts the others.
    """
    if not bool(values_T.isfinite().all()):
        found = (~values_T.isfinite()).nonzero().flatten()
        raise DataError(
            f"{name} must be finite where the mask is 1; got {float(values_T[found[0]])} at token "
            f"{first + int(found[0])}, one of {len(found)}: mask them or mend them"
        )
