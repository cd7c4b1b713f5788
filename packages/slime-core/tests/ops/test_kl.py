import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import KL_LOSS_TYPES
from slime_core.errors import ConfigError
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


def test_an_unknown_kind_lists_the_known():
    with pytest.raises(ConfigError, match="k4 is unknown; allowed: k1, k2, k3, low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
