"""The distance of two tensors. A shape suffix N is the elements of a slice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["shape", "missing", "extra", "values", "rounding", "dtype"]
_SLICE = 2**20  # elements compared at a time
_EXACT = 2.0**52  # differences of integers up to here are exact in float64


class Deviation(NamedTuple):
    """How far two tensors are apart.

    Attributes:
        num_differing: Elements whose bits differ; of tensors with two types, elements whose values differ.
        max_abs_diff: Largest absolute difference, taken in float64. Infinite for a NaN against other bits (with two
            types: against a number), and between unequal infinities.
        relative_error: As of :class:`Difference`.
        kind: What differs: ``values``, ``rounding`` or ``dtype``.
    """

    num_differing: int
    max_abs_diff: float
    relative_error: float = 0.0
    kind: Kind = "values"


def deviation(left: Tensor, right: Tensor) -> Deviation:
    """Compare two tensors of one shape, a slice at a time; those of two types by value."""
    import torch

    types = left.dtype, right.dtype
    if left.is_complex() or right.is_complex():
        left, right = torch.view_as_real(left.to(torch.complex128)), torch.view_as_real(right.to(torch.complex128))
    left, right = left.reshape(-1), right.reshape(-1)
    slices = [_deviation(*both) for both in zip(torch.split(left, _SLICE), torch.split(right, _SLICE), strict=True)]
    number, worst = sum(found.number for found in slices), max((found.largest for found in slices), default=0.0)
    error, norm = math.sqrt(sum(found.squares for found in slices)), math.sqrt(sum(found.of_left for found in slices))
    relative = math.inf if not math.isfinite(worst + error + norm) or (error and not norm) else error / (norm or 1.0)
    rounds = all(found.rounds for found in slices)
    kind: Kind = "values" if types[0] == types[1] or not (number == 0 or rounds) else "rounding" if number else "dtype"
    return Deviation(number, worst, relative, kind)


class _Slice(NamedTuple):
    """Of a slice: elements that differ, the largest difference, the sums of squares of differences and of the left
    side, and whether one side is the other, rounded."""

    number: int
    largest: float
    squares: float
    of_left: float
    rounds: bool


def _deviation(left_N: Tensor, right_N: Tensor) -> _Slice:
    import torch

    if left_N.dtype == right_N.dtype:
        bits = getattr(torch, f"int{8 * left_N.itemsize}")
        differs_N = left_N.view(bits) != right_N.view(bits)
    else:
        left_wide_N, right_wide_N = left_N.double(), right_N.double()
        differs_N = (left_wide_N != right_wide_N) & ~(left_wide_N.isnan() & right_wide_N.isnan())
    of_left = float(left_N.double().nan_to_num(0.0, 0.0, 0.0).square().sum())
    if not differs_N.any():
        return _Slice(0, 0.0, 0.0, of_left, True)
    some_left_N, some_right_N = left_N[differs_N], right_N[differs_N]
    diff_N = _differences(some_left_N, some_right_N).nan_to_num(nan=math.inf, posinf=math.inf)
    rounds = torch.equal(some_left_N.to(some_right_N.dtype), some_right_N) or torch.equal(
        some_right_N.to(some_left_N.dtype), some_left_N
    )
    return _Slice(len(diff_N), float(diff_N.max()), float(diff_N.square().sum()), of_left, rounds)


def _differences(left_N: Tensor, right_N: Tensor) -> Tensor:
    wide_N = (left_N.double() - right_N.double()).abs()
    if left_N.is_floating_point() or right_N.is_floating_point():
        return wide_N
    # float64 rounds long integers, so that neighbours would look equal; an exact difference may overflow instead.
    return (left_N.long() - right_N.long()).double().abs().where(wide_N < _EXACT, wide_N)
