import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import KL_LOSS_TYPES
from slime_core.errors import ConfigError, DataError
from slime_core.ops import (
    cispo_token_loss,
    gspo_token_loss,
    kl_penalty,
    policy_token_loss,
    value_loss,
    value_objective,
)

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


LOG_PROBS = st.floats(-15, 0)


def by_the_definition(policy, reference, kind):
    d = policy - reference
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(max(k3, -10), 10)}[kind]


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS), max_size=8), st.sampled_from(KL_LOSS_TYPES))
def test_equals_the_definition(pairs, kind):
    rows = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    expected = [by_the_definition(policy, reference, kind) for policy, reference in pairs]
    assert kl_penalty(rows[:, 0], rows[:, 1], kind).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
def test_gradcheck_of_the_penalty(kind):
    policy = torch.tensor([-0.1, -2.0, -6.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, -1.0, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lp: kl_penalty(lp, reference, kind), (policy,))


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
@pytest.mark.parametrize("difference", [0.0, 1e-7, 30.0, 1e4, 1e15, -30.0, -1e4, -1e15])
def test_huge_differences_stay_finite(kind, difference):
    """Finite, so that a weight of 0 takes a masked token out of the loss and of the gradient."""
    policy = torch.tensor([-0.5], requires_grad=True)
    value = kl_penalty(policy, torch.tensor([-0.5 - difference]), kind)
    (grad,) = torch.autograd.grad(value.sum(), policy)
    assert value.isfinite().all()
    assert grad.isfinite().all()


def test_k3_still_pulls_the_right_way_beyond_the_limit():
    policy = torch.tensor([-500.0], requires_grad=True)
    kl_penalty(policy, torch.tensor([-1.0]), "k3").sum().backward()
    assert -1e10 < policy.grad.item() < -1e8  # descending it makes the token more likely


def test_the_mean_of_k1_and_k3_is_the_divergence():
    generator = torch.Generator().manual_seed(3)
    policy, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_penalty(policy, reference, kind)).sum(), exact)


def test_shapes_of_the_penalty_must_agree_with_and_without_a_mask():
    for mask in (None, torch.ones(3)):
        with pytest.raises(DataError, match=r"one shape.*ref_log_probs_T \[3, 1\]"):
            kl_penalty(torch.zeros(3), torch.zeros(3, 1), "k1", mask_T=mask)
        with pytest.raises(DataError, match=r"one shape.*log_probs_T \[3\], old_log_probs_T \[1\]"):
            kl_penalty(torch.zeros(3), torch.zeros(3), "k1", old_log_probs_T=torch.zeros(1), mask_T=mask)


def test_an_unknown_kind_lists_the_known():
    with pytest.raises(ConfigError, match="k4 is unknown; allowed: k1, k2, k3, low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS, LOG_PROBS), max_size=8), st.sampled_from(KL_LOSS_TYPES))
def test_the_unbiased_form_equals_the_definition(rows, kind):
    policy, reference, old = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    expected = []
    for p, r, o in rows:
        value = math.exp(p - o) * by_the_definition(p, r, "k3" if kind == "low_var_kl" else kind)
        expected.append(min(max(value, -10), 10) if kind == "low_var_kl" else value)
    estimate = kl_penalty(policy, reference, kind, old_log_probs_T=old)
    assert estimate.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
def test_unbiased_gradcheck(kind):
    policy = torch.tensor([-0.1, -2.0, -6.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, -1.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-0.3, -3.0, -5.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lp: kl_penalty(lp, reference, kind, old_log_probs_T=old), (policy,))


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
def test_the_reference_gets_no_gradient(kind):
    policy, reference = torch.tensor([[-0.1, -2.0], [-0.4, -1.0]], requires_grad=True).unbind()
    leaf = reference.detach().requires_grad_()
    kl_penalty(policy, leaf, kind).sum().backward()
    assert leaf.grad is None


def test_only_the_unbiased_form_has_the_divergences_gradient():
    """Means are taken exactly, over the tokens of a small vocabulary that another policy sampled."""
    generator = torch.Generator().manual_seed(4)
    logits, reference, old = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference, old = logits.log_softmax(-1), reference.log_softmax(-1), old.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in ("k1", "k3"):
        mean = (old.exp() * kl_penalty(policy, reference, kind, old_log_probs_T=old)).sum()
        torch.testing.assert_close(mean, exact)
        torch.testing.assert_close(torch.autograd.grad(mean, logits, retain_graph=True)[0], slope)
    on_policy = policy.detach().exp()
    plain = {kind: (on_policy * kl_penalty(policy, reference, kind)).sum() for kind in ("k1", "k2", "k3")}
    grads = {kind: torch.autograd.grad(mean, logits, retain_graph=True)[0] for kind, mean in plain.items()}
    assert grads["k1"].abs().max() < 1e-12
    torch.testing.assert_close(grads["k2"], slope)
    assert (grads["k3"] - slope).abs().max() > 0.01


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
@pytest.mark.parametrize("difference", [0.0, 30.0, 1e4, 1e15, -30.0, -1e4, -1e15])
def test_the_unbiased_form_stays_finite(kind, difference):
    policy = torch.full((5,), -0.5, requires_grad=True)
    old = -0.5 - torch.tensor([0.0, 30.0, 1e15, -30.0, -1e15])
    value = kl_penalty(policy, torch.full((5,), -0.5 - difference), kind, old_log_probs_T=old)
    (grad,) = torch.autograd.grad(value.sum(), policy)
    assert value.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("difference", [2.0, -2.0])
def test_where_the_ratio_is_held_the_gradient_still_points_to_the_reference(kind, difference):
    policy = torch.tensor([-1.0], requires_grad=True)
    kl_penalty(policy, policy.detach() - difference, kind, old_log_probs_T=torch.tensor([-41.0])).sum().backward()
    assert policy.grad.item() * difference > 0


@pytest.mark.parametrize("kind", KL_LOSS_TYPES)
@pytest.mark.parametrize("unbiased", [False, True])
def test_masked_tokens_may_be_nan(kind, unbiased):
    policy = torch.tensor([-0.1, torch.nan, -2.0], requires_grad=True)
    reference = torch.tensor([-0.5, -1.0, torch.inf])
    old = torch.tensor([-0.2, torch.nan, -torch.inf]).requires_grad_() if unbiased else None
    mask = torch.tensor([1, 0, 0])
    value = kl_penalty(policy, reference, kind, old_log_probs_T=old, mask_T=mask)
    value.sum().backward()
    first = kl_penalty(policy[:1], reference[:1], kind, old_log_probs_T=None if old is None else old[:1])
    assert value.tolist() == [first.item(), 0.0, 0.0]
    assert policy.grad[0].item() != 0
    assert policy.grad[1:].tolist() == [0.0, 0.0]
    assert old is None or old.grad is None


def test_bf16_is_computed_in_fp32():
    policy, reference = torch.tensor([-1.0, -1.0078125], dtype=torch.bfloat16)
    assert kl_penalty(policy, reference, "k3").item() == pytest.approx(math.expm1(-1 / 128) + 1 / 128, rel=1e-3)


NUMBER = st.integers(-24, 24).map(lambda eighths: eighths / 8)  # exact in binary, so ties are exact too
VALUE_ROW = st.tuples(NUMBER, NUMBER, NUMBER)


def value_by_the_paper(value, old, target, clip):
    """Engstrom et al. 2020, section 3: value, gradient, and whether the clipped side is the larger one."""
    near = value if clip is None else min(max(value, old - clip), old + clip)
    plain, clipped = (value - target) ** 2, (near - target) ** 2
    slope = 0.0 if clipped > plain else 2 * (value - target)
    if near != value and clipped == plain:
        slope = None  # two sides of different slope meet, and any slope between theirs is a subgradient
    return max(plain, clipped), slope, clipped > plain


@given(st.lists(VALUE_ROW, max_size=8), st.sampled_from([None, 0.0, 0.25, 1.5]))
def test_equals_the_paper(rows, clip):
    values, old, returns = (
        column.clone().requires_grad_() for column in torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    )
    loss, clipped = value_loss(values, old, returns, clip)
    expected = [value_by_the_paper(*row, clip) for row in rows]
    assert loss.tolist() == [value for value, _, _ in expected]
    assert clipped.tolist() == [was for _, _, was in expected]
    grad, *others = torch.autograd.grad(loss.sum(), (values, old, returns), allow_unused=True)
    assert others == [None, None]
    for slope, (_, expected_slope, _) in zip(grad.tolist(), expected, strict=True):
        assert expected_slope is None or slope == expected_slope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_values_that_moved_beyond_the_clip_are_called_clipped(dtype):
    """The reference is float64, where `old + (V - old)` is V: its rounding in float32 must not look like a clip."""
    torch.manual_seed(0)
    values, old = (torch.randn(2, 20_000) * 0.15).to(dtype)
    returns = torch.randn(20_000)
    wide = [tensor.double() for tensor in (values, old, returns)]
    for clip in (0.2, 0.75, 0.0):
        loss, clipped = value_loss(values, old, returns, clip)
        expected = [value_by_the_paper(*row, clip) for row in zip(*(column.tolist() for column in wide), strict=True)]
        moved = (wide[0] - wide[1]).abs()
        certain = ((moved - clip).abs() > 1e-6) | (moved == 0)
        assert torch.equal(clipped[certain], torch.tensor([was for _, _, was in expected])[certain])
        assert not clipped[(moved <= clip) & certain].any()
        assert loss.tolist() == pytest.approx([value for value, _, _ in expected], rel=1e-5, abs=1e-5)


def test_gradcheck_of_the_value_loss():
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


@given(st.lists(st.tuples(VALUE_ROW, st.floats(0, 1)), max_size=8), st.integers(0, 8))
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
    expected = [(weight, value_by_the_paper(*row, 0.5)) for row, weight in rows]
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
