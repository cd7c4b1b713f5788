import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.ops import policy_loss

ROW = st.tuples(st.floats(-10, 0), st.floats(-10, 0), st.floats(-5, 5))


def by_the_paper(new, old, advantage, low, high):
    """Schulman et al. 2017, equation 7: the expectation of min(...) is maximised, so the loss is its negative."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    slope = 0.0 if clipped * advantage < ratio * advantage else -advantage * ratio
    return -objective, slope, clipped * advantage < ratio * advantage


@given(st.lists(ROW, max_size=8), st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 4.0)]))
def test_value_gradient_and_clipping_equal_the_paper(rows, bounds):
    new, old, advantages = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    new = new.clone().requires_grad_()
    loss, clipped = policy_loss(new, old, advantages, *bounds)
    expected = [by_the_paper(*row, *bounds) for row in rows]
    assert loss.tolist() == pytest.approx([value for value, _, _ in expected], rel=1e-9, abs=1e-12)
    loss.sum().backward()
    assert clipped.tolist() == [was_clipped for _, _, was_clipped in expected]
    # At a tie both sides are the same function's value, and any slope between theirs is a subgradient.
    ratios = [math.exp(a - b) for a, b, _ in rows]
    inner = [abs(r - 1 + bounds[0]) > 1e-9 and abs(r - 1 - bounds[1]) > 1e-9 for r in ratios]
    for gradient, (_, slope, _), comparable in zip(new.grad.tolist(), expected, inner, strict=True):
        if comparable:
            assert gradient == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_gradcheck(advantage):
    new = torch.tensor([-1.0, -1.5, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.05, -1.0, -1.0, -1.0], dtype=torch.float64)
    advantages = torch.full((4,), advantage, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lp: policy_loss(lp, old, advantages, 0.2, 0.28)[0], (new,))


def test_on_policy_the_gradient_is_minus_the_advantage():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, clipped = policy_loss(new, new.detach(), torch.tensor([2.0, -3.0]), 0.2, 0.2)
    loss.sum().backward()
    assert new.grad.tolist() == [-2.0, 3.0]
    assert clipped.tolist() == [False, False]


@given(st.sampled_from([30.0, 89.0, 1e3, 1e15]), st.booleans(), st.sampled_from([0.0, 1.0, -1.0, 1e3]))
def test_huge_and_tiny_ratios_stay_finite(size, grew, advantage):
    """Finite, so that a weight of 0 takes a masked token out of the loss and of the gradient."""
    new = torch.tensor([size if grew else -size], requires_grad=True)
    loss, _ = policy_loss(new, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert loss.isfinite().all()
    assert grad.isfinite().all()


def test_old_log_probs_and_advantages_are_constants():
    old = torch.tensor([-1.0], requires_grad=True)
    advantage = torch.tensor([1.0], requires_grad=True)
    policy_loss(torch.tensor([-1.1], requires_grad=True), old, advantage, 0.2, 0.2)[0].sum().backward()
    assert old.grad is None
    assert advantage.grad is None
