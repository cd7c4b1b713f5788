import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import cispo_token_loss, gspo_token_loss, policy_token_loss

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
    loss, clipped = policy_token_loss(new, old, advantages, *bounds)
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
    assert torch.autograd.gradcheck(lambda lp: policy_token_loss(lp, old, advantages, 0.2, 0.28)[0], (new,))


def test_on_policy_the_gradient_is_minus_the_advantage():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, clipped = policy_token_loss(new, new.detach(), torch.tensor([2.0, -3.0]), 0.2, 0.2)
    loss.sum().backward()
    assert new.grad.tolist() == [-2.0, 3.0]
    assert clipped.tolist() == [False, False]


@given(st.sampled_from([30.0, 89.0, 1e3, 1e15]), st.booleans(), st.sampled_from([0.0, 1.0, -1.0, 1e3]))
def test_huge_and_tiny_ratios_stay_finite(size, grew, advantage):
    """Finite, so that a weight of 0 takes a masked token out of the loss and of the gradient."""
    new = torch.tensor([size if grew else -size], requires_grad=True)
    loss, _ = policy_token_loss(new, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert loss.isfinite().all()
    assert grad.isfinite().all()


def whole_sequence(new, old, advantages, low, high):
    return gspo_token_loss(new, old, advantages, low, high, mask_T=torch.ones(1), lengths=[1])


@pytest.mark.parametrize(
    "loss_of", [policy_token_loss, partial(policy_token_loss, eps_clip_c=3.0), cispo_token_loss, whole_sequence]
)
def test_old_log_probs_and_advantages_are_constants(loss_of):
    new, old, advantage = (torch.tensor([value], requires_grad=True) for value in (-1.1, -1.0, 1.0))
    loss, clipped = loss_of(new, old, advantage, 0.2, 0.2)
    loss.sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert advantage.grad is None
    assert not clipped.requires_grad


def by_the_paper_with_dual_clip(new, old, advantage, low, high, c):
    """Ye et al. 2020: max(min(ρA, clip(ρ)A), cA) where A < 0."""
    loss, slope, clipped = by_the_paper(new, old, advantage, low, high)
    if advantage < 0 and -loss < c * advantage:
        return -c * advantage, 0.0, True
    return loss, slope, clipped


@given(st.lists(ROW, max_size=8), st.sampled_from([(0.2, 0.2), (0.2, 0.28), (1.0, 4.0)]), st.sampled_from([1.5, 3, 10]))
def test_dual_clip_equals_the_paper(rows, bounds, c):
    new, old, advantages = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    new = new.clone().requires_grad_()
    loss, clipped = policy_token_loss(new, old, advantages, *bounds, eps_clip_c=c)
    expected = [by_the_paper_with_dual_clip(*row, *bounds, c) for row in rows]
    assert loss.tolist() == pytest.approx([value for value, _, _ in expected], rel=1e-9, abs=1e-12)
    loss.sum().backward()
    assert clipped.tolist() == [was_clipped for _, _, was_clipped in expected]
    ratios = [math.exp(a - b) for a, b, _ in rows]
    for ratio, gradient, (_, slope, _) in zip(ratios, new.grad.tolist(), expected, strict=True):
        if all(abs(ratio - edge) > 1e-9 for edge in (1 - bounds[0], 1 + bounds[1], c)):  # else: a tie
            assert gradient == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_dual_clip_binds_only_where_the_advantage_is_negative_and_the_ratio_above_c():
    new = torch.tensor([2.0, 2.0, 1.0, -2.0], requires_grad=True)  # c is e^1.1; ratios e², e², e, e^-2
    loss, clipped = policy_token_loss(
        new, torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, -1.0]), 0.2, 0.2, eps_clip_c=math.exp(1.1)
    )
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.2, math.exp(1.1), math.e, 0.8])
    assert clipped.tolist() == [True, True, False, True]
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, math.e, 0.0])


@pytest.mark.parametrize("c", [1.0, 0.5, -3.0, math.inf, math.nan])
def test_a_dual_clip_that_cannot_be(c):
    with pytest.raises(ConfigError, match=r"eps_clip_c \S+ must be a finite number above 1"):
        policy_token_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), 0.2, 0.2, eps_clip_c=c)


def cispo_by_the_paper(new, old, advantage, low, high):
    """MiniMax 2025, equations 4 and 5: value, gradient, and whether the weight was clipped."""
    ratio = math.exp(new - old)
    weight = min(max(ratio, 1 - low), 1 + high)
    return -weight * advantage * new, -weight * advantage, weight != ratio


@given(st.lists(ROW, max_size=8), st.sampled_from([(1.0, 4.0), (0.2, 0.28), (5.0, 1.0), (0.0, 0.0)]))
def test_cispo_equals_the_paper(rows, bounds):
    new, old, advantages = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    new, old = new.clone().requires_grad_(), old.clone().requires_grad_()
    loss, clipped = cispo_token_loss(new, old, advantages, *bounds)
    expected = [cispo_by_the_paper(*row, *bounds) for row in rows]
    assert loss.tolist() == pytest.approx([value for value, _, _ in expected], rel=1e-9, abs=1e-12)
    new_grad, old_grad = torch.autograd.grad(loss.sum(), (new, old), allow_unused=True)
    assert new_grad.tolist() == pytest.approx([slope for _, slope, _ in expected], rel=1e-9, abs=1e-12)
    assert old_grad is None
    edges = (1 - bounds[0], 1 + bounds[1])
    for (a, b, _), was, (_, _, expected_was) in zip(rows, clipped.tolist(), expected, strict=True):
        if all(abs(math.exp(a - b) - edge) > 1e-9 for edge in edges):
            assert was == expected_was


def test_cispo_keeps_the_gradient_that_ppo_drops():
    new, one = torch.tensor([-0.5], requires_grad=True), torch.ones(1)
    for loss_of, expected in ((policy_token_loss, 0.0), (cispo_token_loss, -1.28)):
        loss, clipped = loss_of(new, torch.tensor([-2.5]), one, 0.2, 0.28)
        assert clipped.item()
        assert torch.autograd.grad(loss.sum(), new)[0].item() == pytest.approx(expected)


def test_cispo_without_an_upper_bound_stays_finite():
    new = torch.tensor([1e4], requires_grad=True)
    loss, _ = cispo_token_loss(new, torch.zeros(1), torch.ones(1), 1.0, math.inf)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), new)[0].isfinite().all()


@pytest.mark.parametrize("loss_of", [policy_token_loss, partial(policy_token_loss, eps_clip_c=3.0), cispo_token_loss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tokens_may_be_nan_and_the_rest_is_finite(loss_of, dtype):
    sizes = [0.0, torch.nan, 30.0, -30.0, 1e4, -1e4, 1e15, -1e15, torch.inf]
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 0])
    new = torch.tensor(sizes, dtype=dtype, requires_grad=True)
    for advantage in (1.0, -1.0, 0.0):
        advantages = torch.full_like(new, advantage).detach().masked_fill(mask == 0, torch.nan)
        loss, clipped = loss_of(new, torch.zeros(9, dtype=dtype), advantages, 0.2, 0.28, mask_T=mask)
        (grad,) = torch.autograd.grad(loss.sum(), new)
        assert loss.dtype == torch.float32
        assert loss.isfinite().all()
        assert grad.isfinite().all()
        assert loss[mask == 0].tolist() == grad[mask == 0].tolist() == [0.0, 0.0]
        assert not clipped[mask == 0].any()


@given(st.lists(st.tuples(ROW, st.booleans()), max_size=8))
def test_a_mask_changes_nothing_for_the_other_tokens(rows):
    new, old, advantages = torch.tensor([row for row, _ in rows]).reshape(-1, 3).unbind(1)
    mask = torch.tensor([kept for _, kept in rows], dtype=torch.bool)
    for loss_of in (policy_token_loss, partial(policy_token_loss, eps_clip_c=2.0), cispo_token_loss):
        plain, plain_clipped = loss_of(new, old, advantages, 0.2, 0.28)
        loss, clipped = loss_of(new, old, advantages, 0.2, 0.28, mask_T=mask)
        assert loss.equal(torch.where(mask, plain, 0.0))
        assert clipped.equal(plain_clipped & mask)


def test_shapes_must_agree_with_and_without_a_mask():
    """A column would broadcast to a loss of T × T numbers."""
    three = torch.zeros(3)
    for loss_of in (policy_token_loss, cispo_token_loss):
        for mask in (None, torch.ones(3)):
            with pytest.raises(DataError, match=r"one shape.*old_log_probs_T \[3, 1\]"):
                loss_of(three, three.unsqueeze(1), three, 0.2, 0.2, mask_T=mask)
        with pytest.raises(DataError, match=r"one shape.*mask_T \[3, 1\]"):
            loss_of(three, three, three, 0.2, 0.2, mask_T=torch.ones(3, 1))


def test_narrow_bounds_survive_bf16():
    """1 + 2e-4 is 1 in bf16: computed there, every ratio above 1 would be clipped."""
    new = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    _, clipped = policy_token_loss(new, torch.tensor([-1.0001]), torch.ones(1), 2e-4, 2e-4)
    assert not clipped.item()
