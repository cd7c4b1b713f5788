import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import dpo_pair_loss, preference_objective, reward_model_loss

MASK = st.lists(st.integers(0, 1), max_size=4)
PAIRS = st.lists(st.tuples(MASK, MASK), max_size=4)
SCORE = st.floats(-8, 8)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


class Batch:
    """Responses flat, chosen before rejected; NaN wherever the mask is 0."""

    def __init__(self, pairs, seed):
        generator = torch.Generator().manual_seed(seed)
        masks = [mask for pair in pairs for mask in pair]
        self.masks, self.lengths = masks, [len(mask) for mask in masks]
        self.mask = torch.tensor([m for mask in masks for m in mask])
        noise = torch.randn(2, len(self.mask), generator=generator, dtype=torch.float64)
        self.new, self.ref = noise.masked_fill(self.mask == 0, torch.nan).unbind(0)
        self.new = self.new.clone().requires_grad_()

    def loss(self, reference_free, pairs=slice(None), **options):
        members = list(range(len(self.lengths) // 2))[pairs]
        chosen = [n for pair in members for n in (2 * pair, 2 * pair + 1)]
        starts = [sum(self.lengths[:n]) for n in range(len(self.lengths))]
        rows = torch.tensor([t for n in chosen for t in range(starts[n], starts[n] + self.lengths[n])]).long()
        return dpo_pair_loss(
            self.new[rows], None if reference_free else self.ref[rows], mask_T=self.mask[rows],
            lengths=[self.lengths[n] for n in chosen], reference_free=reference_free, **options,
        )  # fmt: skip

    def by_the_paper(self, beta, smoothing, reference_free):
        """Rafailov et al. 2023, equation 7; Mitchell 2023 for the smoothing. The losses, rewards and slopes."""
        rewards, start = [], 0
        for mask in self.masks:
            ratios = [
                self.new[start + t].item() - (0.0 if reference_free else self.ref[start + t].item())
                for t, m in enumerate(mask)
                if m
            ]
            rewards.append(beta * sum(ratios))
            start += len(mask)
        losses, slopes = [], []
        for pair, (chosen, rejected) in enumerate(zip(rewards[::2], rewards[1::2], strict=True)):
            h = chosen - rejected
            losses.append(-(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h))
            slope = beta * (1 / (1 + math.exp(-h)) - (1 - smoothing))
            slopes += [slope * m for m in self.masks[2 * pair]] + [-slope * m for m in self.masks[2 * pair + 1]]
        return losses, rewards, slopes


@given(PAIRS, st.integers(0, 2**16), st.sampled_from([0.1, 2.0]), st.sampled_from([0.0, 0.2]), st.booleans())
def test_dpo_equals_the_paper(pairs, seed, beta, smoothing, reference_free):
    """No pair at all, empty responses and wholly masked ones included."""
    batch = Batch(pairs, seed)
    loss, chosen, rejected = batch.loss(reference_free, beta=beta, label_smoothing=smoothing)
    losses, rewards, slopes = batch.by_the_paper(beta, smoothing, reference_free)
    assert loss.tolist() == pytest.approx(losses, rel=1e-9, abs=1e-12)
    assert chosen.tolist() == pytest.approx(rewards[::2], rel=1e-9, abs=1e-12)
    assert rejected.tolist() == pytest.approx(rewards[1::2], rel=1e-9, abs=1e-12)
    assert torch.autograd.grad(loss.sum(), batch.new)[0].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@given(PAIRS.filter(bool), st.integers(0, 2**16), st.integers(0, 4))
def test_any_split_gives_the_same_objective(pairs, seed, cut):
    batch = Batch(pairs, seed)

    def objective(part):
        return preference_objective(*batch.loss(False, part, beta=0.5), global_pairs=len(pairs))

    whole, metrics = objective(slice(None))
    losses, rewards, _ = batch.by_the_paper(0.5, 0.0, False)
    chosen, rejected = rewards[::2], rewards[1::2]
    expected = {
        "loss": sum(losses),
        "accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)),
        "chosen_reward": sum(chosen),
        "rejected_reward": sum(rejected),
        "reward_margin": sum(chosen) - sum(rejected),
    }
    for name, total in expected.items():
        assert metrics[name].item() == pytest.approx(total / len(pairs), rel=1e-9, abs=1e-12)
    parts = [objective(slice(cut)), objective(slice(cut, None))]
    for name, value in metrics.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        sum(torch.autograd.grad(loss, batch.new)[0] for loss, _ in parts),
        torch.autograd.grad(whole, batch.new)[0], rtol=1e-9, atol=1e-12,
    )  # fmt: skip


@given(st.lists(st.tuples(SCORE, SCORE, st.floats(0, 3)), max_size=6), st.booleans())
def test_the_reward_model_loss_equals_the_paper(rows, with_margins):
    """Ouyang et al. 2022, equation 1; Touvron et al. 2023, equation 2."""
    chosen, rejected, margins = (
        column.clone().requires_grad_() for column in torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    )
    loss = reward_model_loss(chosen, rejected, margins_P=margins if with_margins else None)
    leads = [c - r - (m if with_margins else 0.0) for c, r, m in rows]
    assert loss.tolist() == pytest.approx([-log_sigmoid(lead) for lead in leads], rel=1e-9, abs=1e-12)
    grads = torch.autograd.grad(loss.sum(), (chosen, rejected, margins), allow_unused=True)
    slopes = [1 / (1 + math.exp(-lead)) - 1 for lead in leads]
    assert grads[0].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert grads[1].tolist() == pytest.approx([-slope for slope in slopes], rel=1e-9, abs=1e-12)
    assert grads[2] is None


def test_gradcheck():
    new = torch.tensor([-0.5, -1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    options = {"mask_T": torch.tensor([1, 1, 0, 1]), "lengths": [2, 2], "beta": 0.7, "label_smoothing": 0.1}
    assert torch.autograd.gradcheck(lambda lp: dpo_pair_loss(lp, -torch.ones_like(lp), **options)[0], new)
    assert torch.autograd.gradcheck(reward_model_loss, (new, new.detach().flip(0).requires_grad_()))


def test_the_reference_is_a_constant_and_the_rewards_are_detached():
    new, ref = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    loss, chosen, rejected = dpo_pair_loss(new, ref, mask_T=torch.ones(2), lengths=[1, 1], beta=1.0)
    loss.sum().backward()
    assert ref.grad is None
    assert new.grad.tolist() == [-0.5, 0.5]
    assert not chosen.requires_grad
    assert not rejected.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e3, -1e3, 1e15, -1e15])
def test_wild_margins_stay_finite(size, dtype):
    new = torch.tensor([size, torch.nan, -size], dtype=dtype, requires_grad=True)
    ref, mask = torch.zeros(3, dtype=dtype), torch.tensor([1, 0, 1])
    for smoothing in (0.0, 0.3):
        loss, _, _ = dpo_pair_loss(new, ref, mask_T=mask, lengths=[2, 1], beta=1.0, label_smoothing=smoothing)
        (grad,) = torch.autograd.grad(loss.sum(), new)
        assert loss.dtype == torch.float32
        assert loss.isfinite().all()
        assert grad.isfinite().all()
        assert grad[1].item() == 0
    loss = reward_model_loss(new[:1], new[2:])
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), new)[0].isfinite().all()


def test_long_responses_keep_the_digits_of_their_difference():
    """Two sums of 32,768 log-probs near −1,000 nats each, 1e-6 apart per token."""
    generator = torch.Generator().manual_seed(0)
    ref = -torch.rand(65536, generator=generator) / 16
    delta = torch.cat([torch.full((32768,), 2.0**-20), torch.zeros(32768)])
    _, chosen, rejected = dpo_pair_loss(ref + delta, ref, mask_T=torch.ones(65536), lengths=[32768, 32768], beta=1.0)
    assert chosen.item() == pytest.approx(2.0**-5, rel=2e-3)
    assert rejected.item() == 0.0


def test_what_cannot_be():
    two = torch.zeros(2)
    pair = {"mask_T": torch.ones(2), "lengths": [1, 1]}
    for beta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"beta \S+ must be a finite number above 0"):
            dpo_pair_loss(two, two, beta=beta, **pair)
    for smoothing in (-0.1, 0.5, math.nan):
        with pytest.raises(ConfigError, match=r"label_smoothing \S+ must be 0 or more and below 0.5"):
            dpo_pair_loss(two, two, beta=0.1, label_smoothing=smoothing, **pair)
    with pytest.raises(ConfigError, match="none were given"):
        dpo_pair_loss(two, None, beta=0.1, **pair)
    with pytest.raises(ConfigError, match="given with reference_free"):
        dpo_pair_loss(two, two, beta=0.1, reference_free=True, **pair)
    with pytest.raises(DataError, match="1 responses are not pairs"):
        dpo_pair_loss(two, two, beta=0.1, mask_T=torch.ones(2), lengths=[2])
    with pytest.raises(DataError, match=r"chosen_P \[2\], rejected_P \[2, 1\]"):
        reward_model_loss(two, two.unsqueeze(1))
    with pytest.raises(DataError, match="global_pairs 0 must be 1 or more"):
        preference_objective(two, two, two, global_pairs=0)
