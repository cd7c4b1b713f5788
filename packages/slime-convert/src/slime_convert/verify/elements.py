"""How far two tensors of one shape are apart. Pure functions; a slice of each is widened at a time.

Notation: N elements of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLICE = 2**20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 2.0**52  # differences of integers up to here are exact in float64


@dataclass(frozen=True)
class Deviation:
    """How far two tensors are apart.

    Attributes:
        num_differing: Elements whose bits differ; of tensors with two types, elements whose values differ.
        max_abs_diff: Largest absolute difference, taken in float64. Infinite where a NaN stands opposite anything but
            the same bits (or, with two types, but another NaN), and between unequal infinities.
    """

    num_differing: int
    max_abs_diff: float


EQUAL = Deviation(0, 0.0)


def deviation(left: Tensor, right: Tensor) -> Deviation:
    """Compare two tensors.

    Args:
        left: Any shape and type.
        right: The same shape; another type is compared by value.
    """
    if left.is_complex() or right.is_complex():
        left, right = torch.view_as_real(left.to(torch.complex128)), torch.view_as_real(right.to(torch.complex128))
    left, right = left.reshape(-1), right.reshape(-1)
    worst = EQUAL
    for start in range(0, left.numel(), SLICE):
        found = _of_slices(left[start : start + SLICE], right[start : start + SLICE])
        worst = Deviation(worst.num_differing + found.num_differing, max(worst.max_abs_diff, found.max_abs_diff))
    return worst


def _of_slices(left_N: Tensor, right_N: Tensor) -> Deviation:
    if left_N.dtype == right_N.dtype:
        left_bits_N, right_bits_N = (slice_N.view(_BITS[slice_N.itemsize]) for slice_N in (left_N, right_N))
        if torch.equal(left_bits_N, right_bits_N):
            return EQUAL
        differs_N = left_bits_N != right_bits_N
    else:
        left_wide_N, right_wide_N = left_N.double(), right_N.double()
        differs_N = (left_wide_N != right_wide_N) & ~(left_wide_N.isnan() & right_wide_N.isnan())
    if not differs_N.any():
        return EQUAL
    diff_N = _differences(left_N, right_N)[differs_N]
    return Deviation(int(differs_N.sum()), float(diff_N.nan_to_num(nan=torch.inf, posinf=torch.inf).max()))


def _differences(left_N: Tensor, right_N: Tensor) -> Tensor:
    wide_N = (left_N.double() - right_N.double()).abs()
    if left_N.is_floating_point() or right_N.is_floating_point():
        return wide_N
    # float64 rounds long integers, so that neighbours would look equal; an exact difference may overflow instead.
    exact_N = (left_N.to(torch.int64) - right_N.to(torch.int64)).double().abs()
    return torch.where(wide_N < _EXACT, exact_N, wide_N)
