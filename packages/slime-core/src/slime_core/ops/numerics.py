"""Exponentials that stay finite, so that a token which the two policies see very differently cannot bring NaN.

A plain ``exp`` overflows in fp32 at 88. Its infinity becomes NaN as soon as a mask or the unused side of a clip
multiplies it by zero. Cutting the exponent instead would drop the gradient's direction where it matters most, so above
``LIMIT`` the functions go on along their tangent: finite, monotone and exact below.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = 20.0
"""Largest exponent taken exactly (a ratio of 4.9e8)."""


def bounded_exp(x: Tensor) -> Tensor:
    """``exp(x)``, above ``LIMIT`` its tangent there."""
    return x.clamp(max=LIMIT).exp() + math.exp(LIMIT) * torch.relu(x - LIMIT)


def bounded_expm1_minus(x: Tensor) -> Tensor:
    """``exp(x) - 1 - x`` (never negative, accurate near 0), above ``LIMIT`` its tangent there."""
    inner = x.clamp(max=LIMIT)
    return inner.expm1() - inner + math.expm1(LIMIT) * torch.relu(x - LIMIT)
