"""The recurrence behind discounted returns and generalised advantages, for all tokens at once.

T tokens of N sequences, K of them trained; C chunks of L steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slime_core.errors import DataError

CHUNK = 24
"""Most tokens in a chunk: the more, the more multiplications per token and the fewer chunks."""

CHUNK_OF_CHUNKS = 128
"""Most chunks that are one step each of a chunk in turn: they are few, so that fewer levels count for more."""

CPU_BLOCK = 2**17
"""Tokens that a CPU works on at a time: so few that its caches hold them, and that the allocator keeps the memory."""


def blocks(lengths_N: Tensor) -> list[tuple[slice, slice]]:
    """Whole sequences to work on at a time, as tokens and sequences: all at once unless on a CPU.

    A block has ``CPU_BLOCK`` tokens at most, or a single longer sequence.
    """
    count = len(lengths_N)
    ends_N = lengths_N.cumsum(0)
    total = int(ends_N[-1]) if count else 0
    if lengths_N.device.type != "cpu" or total <= CPU_BLOCK:
        return [(slice(0, total), slice(0, count))]
    result, token, sequence = [], 0, 0
    while sequence < count:
        stop = max(int(torch.searchsorted(ends_N, token + CPU_BLOCK, right=True)), sequence + 1)
        end = int(ends_N[stop - 1])
        result.append((slice(token, end), slice(sequence, stop)))
        token, sequence = end, stop
    return result


class Trained(NamedTuple):
    """The K tokens of some sequences that are trained on, one sequence after the other.

    Attributes:
        token_K: Where they stand among the T; ``None`` if all are trained on.
        lengths_N: Trained tokens of each sequence.
    """

    token_K: Tensor | None
    lengths_N: Tensor

    @classmethod
    def of(cls, lengths_N: Tensor, mask_T: Tensor) -> Trained:
        """Leave out what is masked.

        Args:
            lengths_N: From :func:`slime_core.ops.ragged.lengths_tensor`.
            mask_T: Not 0 where a token is trained.
        """
        if len(mask_T) == 0 or bool(mask_T.min() > 0):
            return cls(None, lengths_N)
        token_K = mask_T.nonzero().flatten()
        before_N = torch.searchsorted(token_K, lengths_N.cumsum(0))
        return cls(token_K, before_N.diff(prepend=before_N.new_zeros(1)))

    def pick(self, name: str, values_T: Tensor, first: int) -> Tensor:
        """A copy of their values without gradient, float64 [K].

        Args:
            name: What the values are called.
            values_T: The values.
            first: The caller's number of the first of these tokens.

        Raises:
            DataError: A value is NaN or infinite; names the token.
        """
        values_K = values_T.detach() if self.token_K is None else values_T.detach().index_select(0, self.token_K)
        values_K = values_K.to(torch.float64, copy=True)
        # One sum is quicker than a look at each token, and only where it overflows for nothing are both taken.
        if not math.isfinite(float(values_K.sum())):
            check_finite(name, self.write(values_K, torch.empty_like(values_T, dtype=torch.float64)), first)
        return values_K

    def write(self, values_K: Tensor, result_T: Tensor) -> Tensor:
        """Write their values, 0 for a masked token, to ``result_T``, in its type."""
        if self.token_K is None:
            return result_T.copy_(values_K)
        return result_T.zero_().scatter_(0, self.token_K, values_K.to(result_T.dtype))


def add_following(target_T: Tensor, values_T: Tensor, factor: float, lengths_N: Tensor) -> Tensor:
    """Add, in place, ``factor`` times the value of the next token in the same sequence, where there is one."""
    if len(target_T):
        last_N = lengths_N.cumsum(0) - 1  # of an empty sequence: the last of the one before, or at −1 of all
        kept_N = target_T[last_N]
        target_T[:-1].add_(values_T[1:], alpha=factor)
        target_T[last_N] = kept_N
    return target_T


def reverse_scan_(values_T: Tensor, lengths_N: Tensor, decay: float, *, most: int = CHUNK) -> Tensor:
    """Replace x by y with ``y_t = x_t + decay · y_{t+1}`` within each sequence.

    Instead of T steps in a row: every sequence is cut into chunks, and each of them is a row of one product with the
    powers of ``decay``. What a chunk takes over from the next one follows the same recurrence, with ``decay ** L``,
    over the chunks; and so on, until each sequence is one chunk. In float64, which neither TF32 nor autocast touches.

    Args:
        values_T: x, float64; finite, since what a chunk holds mixes.
        lengths_N: Tokens of each sequence, T in all.
        decay: 0 to 1.
        most: Most steps in a chunk.

    Returns:
        ``values_T``, now y.
    """
    if len(values_T) == 0:
        return values_T
    longest = int(lengths_N.max())
    size = min(most, longest)
    count_N = (lengths_N + (size - 1)) // size
    place_T = _places(lengths_N, count_N, size, len(values_T))
    row = values_T.new_zeros(int(count_N.sum()) * size).scatter_(0, place_T, values_T)
    step_L = torch.arange(size, dtype=values_T.dtype, device=values_T.device)
    powers_LL = torch.pow(decay, (step_L.unsqueeze(1) - step_L).clamp_(min=0)).tril_()
    chunks_CL = row.view(-1, size) @ powers_LL
    if longest > size:
        heads_C = reverse_scan_(chunks_CL[:, 0].clone(), count_N, decay**size, most=CHUNK_OF_CHUNKS)
        carry_C = add_following(torch.zeros_like(heads_C), heads_C, 1.0, count_N)
        chunks_CL.addcmul_(carry_C.unsqueeze(1), powers_LL[-1] * decay)
    return torch.index_select(chunks_CL.view(-1), 0, place_T, out=values_T)


def _places(lengths_N: Tensor, count_N: Tensor, size: int, total: int) -> Tensor:
    """Where tokens stand if each sequence begins a chunk: one place after another, some left out before a sequence."""
    starts_N = lengths_N.cumsum(0) - lengths_N
    skipped_N = (count_N.cumsum(0) - count_N) * size - starts_N
    step_T = torch.ones(total + 1, dtype=torch.int64, device=lengths_N.device)  # the last is an empty sequence's
    step_T.index_add_(0, starts_N, skipped_N.diff(prepend=skipped_N.new_ones(1)))
    return step_T.cumsum_(0)[:-1]


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
