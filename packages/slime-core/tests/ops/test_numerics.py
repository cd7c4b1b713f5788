import math

import pytest
import torch

from slime_core.ops.tokens import LIMIT, bounded_exp, bounded_expm1_minus

FUNCTIONS = [(bounded_exp, math.exp), (bounded_expm1_minus, lambda x: math.expm1(x) - x)]


@pytest.mark.parametrize(("function", "reference"), FUNCTIONS)
def test_exact_up_to_the_limit(function, reference):
    x = torch.tensor([-800.0, -20.0, -1.0, -1e-3, 0.0, 1e-5, 1.0, LIMIT], dtype=torch.float64)
    assert function(x).tolist() == pytest.approx([reference(value) for value in x.tolist()], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("function", "reference"), FUNCTIONS)
def test_goes_on_along_its_tangent(function, reference):
    x = torch.tensor([LIMIT + 1, 1e4, torch.inf], requires_grad=True)
    y = function(x)
    slope = reference(LIMIT + 1e-6) - reference(LIMIT)
    assert y.tolist() == pytest.approx([reference(LIMIT) + slope * 1e6 * (v - LIMIT) for v in x.tolist()], rel=1e-5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == pytest.approx([slope * 1e6] * 3, rel=1e-5)


def test_small_differences_keep_their_digits_in_fp32():
    """exp(x) - 1 - x is x²/2 there; the plain formula has no correct digit left."""
    x = torch.tensor([1e-2, -1e-2, 1e-3])
    assert bounded_expm1_minus(x).tolist() == pytest.approx([math.expm1(v) - v for v in x.tolist()], rel=1e-3)
