import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import KL_LOSS_TYPES
from slime_core.errors import ConfigError, DataError
from slime_core.ops import kl_penalty

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
def test_gradcheck(kind):
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


def test_shapes_must_agree_with_and_without_a_mask():
    for mask in (None, torch.ones(3)):
        with pytest.raises(DataError, match=r"one shape.*ref_log_probs_T \[3, 1\]"):
            kl_penalty(torch.zeros(3), torch.zeros(3, 1), "k1", mask_T=mask)
        with pytest.raises(DataError, match=r"one shape.*old_log_probs_T \[1\]"):
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
