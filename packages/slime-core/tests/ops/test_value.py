import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import value_loss, value_objective

NUMBER = st.integers(-24, 24).map(lambda eighths: eighths / 8)  # exact in binary, so ties are exact too
ROW = st.tuples(NUMBER, NUMBER, NUMBER)


def by_the_paper(value, old, target, clip):
    """Engstrom et al. 2020, section 3: value, gradient, and whether the clipped side is the larger one."""
    near = value if clip is None else min(max(value, old - clip), old + clip)
    plain, clipped = (value - target) ** 2, (near - target) ** 2
    slope = 0.0 if clipped > plain else 2 * (value - target)
    if near != value and clipped == plain:
        slope = None  # two sides of different slope meet, and any slope between theirs is a subgradient
    return max(plain, clipped), slope, clipped > plain


@given(st.lists(ROW, max_size=8), st.sampled_from([None, 0.0, 0.25, 1.5]))
def test_equals_the_paper(rows, clip):
    values, old, returns = (
        column.clone().requires_grad_() for column in torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    )
    loss, clipped = value_loss(values, old, returns, clip)
    expected = [by_the_paper(*row, clip) for row in rows]
    assert loss.tolist() == [value for value, _, _ in expected]
    assert clipped.tolist() == [was for _, _, was in expected]
    grad, *others = torch.autograd.grad(loss.sum(), (values, old, returns), allow_unused=True)
    assert others == [None, None]
    for slope, (_, expected_slope, _) in zip(grad.tolist(), expected, strict=True):
        assert expected_slope is None or slope == expected_slope


def test_gradcheck():
    values = torch.tensor([0.3, 1.0, -2.0, 0.1], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 0.1, 1.0, 0.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2)[0], values)


def test_a_step_too_far_towards_the_return_gains_nothing():
    values = torch.tensor([0.5, -0.5], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(2), torch.ones(2), 0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.64, 2.25])
    assert clipped.tolist() == [True, False]
    assert values.grad.tolist() == [0.0, -3.0]


@given(st.lists(st.tuples(ROW, st.floats(0, 1)), max_size=8), st.integers(0, 8))
def test_the_objective_is_the_weighted_sum_however_it_is_split(rows, cut):
    """NaN wherever the weight is 0."""
    weights = torch.tensor([weight for _, weight in rows], dtype=torch.float64)
    columns = torch.tensor([row for row, _ in rows], dtype=torch.float64).reshape(-1, 3)
    columns = columns.masked_fill((weights == 0).unsqueeze(1), torch.nan).requires_grad_()

    def objective(part):
        values, old, returns = columns[part].unbind(1)
        return value_objective(
            values_T=values, old_values_T=old, returns_T=returns, weights_T=weights[part], value_clip=0.5
        )

    loss, metrics = objective(slice(None))
    expected = [(weight, by_the_paper(*row, 0.5)) for row, weight in rows]
    assert loss.item() == pytest.approx(sum(w * value for w, (value, _, _) in expected), rel=1e-9, abs=1e-12)
    assert metrics["value_loss"].item() == loss.item()
    clipped = sum(weight * was for weight, (_, _, was) in expected)
    assert metrics["value_clipfrac"].item() == pytest.approx(clipped, abs=1e-12)
    parts = [objective(slice(cut)), objective(slice(cut, None))]
    for name in metrics:
        torch.testing.assert_close(sum(part[name] for _, part in parts), metrics[name], rtol=1e-9, atol=1e-12)
    (whole,) = torch.autograd.grad(loss, columns)
    assert whole.isfinite().all()
    torch.testing.assert_close(
        sum(torch.autograd.grad(part, columns)[0] for part, _ in parts), whole, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1e15, -1e15])
def test_wild_values_stay_finite(value, dtype):
    values = torch.tensor([value, torch.nan], dtype=dtype, requires_grad=True)
    loss, _ = value_loss(values, torch.zeros(2), torch.full((2,), -value), 0.2, mask_T=torch.tensor([1, 0]))
    (grad,) = torch.autograd.grad(loss.sum(), values)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert grad.isfinite().all()
    assert (loss[1].item(), grad[1].item()) == (0, 0)


def test_what_cannot_be():
    three = torch.zeros(3)
    for clip in (-0.1, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"value_clip \S+ must be a finite number, 0 or more"):
            value_loss(three, three, three, clip)
    with pytest.raises(DataError, match=r"values_T \[3, 1\], old_values_T \[3\]"):
        value_loss(three.unsqueeze(1), three, three, 0.2)
