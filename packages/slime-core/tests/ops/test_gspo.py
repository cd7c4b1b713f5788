import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops import gspo_log_ratio, gspo_token_loss, token_weights

MASKS = st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=6)
BOUNDS = st.sampled_from([(3e-4, 4e-4), (0.2, 0.28), (0.0, 0.0), (1.0, 4.0)])


class Batch:
    """Log-probs and advantages of ragged sequences, flat, in float64; NaN wherever the mask is 0."""

    def __init__(self, masks, seed, spread=0.3):
        generator = torch.Generator().manual_seed(seed)
        self.masks, self.lengths = masks, [len(mask) for mask in masks]
        self.mask = torch.tensor([m for mask in masks for m in mask])
        hole = torch.where(self.mask == 0, torch.nan, 0.0).double()
        noise = torch.randn(3, len(self.mask), generator=generator, dtype=torch.float64)
        self.old = -1 - noise[0].abs() + hole
        self.new = (self.old + spread * noise[1]).requires_grad_()
        self.token_advantages = noise[2] + hole
        self.rewards = torch.randn(len(masks), generator=generator, dtype=torch.float64)
        self.advantages = self.rewards.repeat_interleave(torch.tensor(self.lengths)) + hole

    def loss(self, bounds, members=None, per_token=False, **options):
        """The loss summed over some of the sequences, with weights of the whole batch."""
        members = range(len(self.masks)) if members is None else members
        starts = [sum(self.lengths[:n]) for n in range(len(self.masks))]
        rows = torch.tensor([t for n in members for t in range(starts[n], starts[n] + self.lengths[n])]).long()
        masks = [self.masks[n] for n in members]
        weights = token_weights(
            masks,
            global_samples=len(self.masks),
            global_tokens=int(self.mask.sum()),
            per_token=per_token,
            dtype=torch.float64,
        )
        loss, clipped = gspo_token_loss(
            self.new[rows], self.old[rows], self.advantages[rows], *bounds,
            mask_T=self.mask[rows], lengths=[len(mask) for mask in masks], **options,
        )  # fmt: skip
        return (loss * weights).sum(), clipped


def by_the_paper(batch, bounds, c=math.inf):
    """Zheng et al. 2025: equations 5 and 7 for the value, equation 10 (with the clip) for the gradient.

    And Ye et al. 2020 for the dual clip's c.
    """
    objective, slopes, start = 0.0, [], 0
    size = len(batch.masks)
    for mask, reward in zip(batch.masks, batch.rewards.tolist(), strict=True):
        new, old = batch.new[start : start + len(mask)].tolist(), batch.old[start : start + len(mask)].tolist()
        start += len(mask)
        count = sum(mask)
        total = sum(a - b for a, b, m in zip(new, old, mask, strict=True) if m)
        s = math.exp(total / count) if count else 1.0
        clipped = min(max(s, 1 - bounds[0]), 1 + bounds[1])
        value, slope = min(s * reward, clipped * reward), s * reward
        if clipped * reward < s * reward:
            slope = 0.0
        if reward < 0 and value < c * reward:
            value, slope = c * reward, 0.0
        if count:
            objective += value / size
        slope *= 1 / max(count, 1) / size
        slopes += [slope * m for m in mask]
    return -objective, [-slope for slope in slopes]


@given(MASKS, st.integers(0, 2**16), BOUNDS, st.booleans())
def test_both_forms_have_the_papers_value_and_gradient(masks, seed, bounds, token_form):
    """NaN at every masked place, empty and wholly masked sequences included."""
    batch = Batch(masks, seed)
    loss, _ = batch.loss(bounds, token_form=token_form)
    expected, slopes = by_the_paper(batch, bounds)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if bounds != (0.0, 0.0):  # there a one-token sequence can tie with both bounds
        (grad,) = torch.autograd.grad(loss, batch.new)
        assert grad.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@given(MASKS, st.integers(0, 2**16), st.booleans())
def test_the_dual_clip_bounds_the_sequence_ratio(masks, seed, token_form):
    batch = Batch(masks, seed, spread=1.0)
    loss, _ = batch.loss((0.2, 0.28), token_form=token_form, eps_clip_c=1.5)
    expected, slopes = by_the_paper(batch, (0.2, 0.28), c=1.5)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    (grad,) = torch.autograd.grad(loss, batch.new)
    assert grad.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@given(MASKS, st.integers(0, 2**16))
def test_log_ratios_are_means_over_unmasked_tokens(masks, seed):
    """Zheng et al. 2025, equation 7; the same at every token of the sequence, in both forms."""
    batch = Batch(masks, seed)
    expected, start = [], 0
    for mask in masks:
        found = [batch.new[start + t].item() - batch.old[start + t].item() for t, m in enumerate(mask) if m]
        expected.append(sum(found) / len(found) if found else 0.0)
        start += len(mask)
    options = {"mask_T": batch.mask, "lengths": batch.lengths}
    everywhere = [value for value, mask in zip(expected, masks, strict=True) for _ in mask]
    for token_form in (False, True):
        ours = gspo_log_ratio(batch.new, batch.old, **options, token_form=token_form)
        assert ours.tolist() == pytest.approx(everywhere, abs=1e-12)


@given(MASKS, st.integers(0, 2**16), st.booleans(), st.booleans(), st.integers(2, 3))
def test_any_split_gives_the_same_loss_and_gradient(masks, seed, token_form, per_token, parts):
    batch = Batch(masks, seed)
    options = {"token_form": token_form, "per_token": per_token, "eps_clip_c": 1.5}
    whole, _ = batch.loss((0.1, 0.2), **options)
    (whole_grad,) = torch.autograd.grad(whole, batch.new)
    losses = [batch.loss((0.1, 0.2), range(part, len(masks), parts), **options)[0] for part in range(parts)]
    torch.testing.assert_close(sum(losses), whole, rtol=1e-9, atol=1e-12)
    summed = sum(torch.autograd.grad(loss, batch.new)[0] for loss in losses)
    torch.testing.assert_close(summed, whole_grad, rtol=1e-9, atol=1e-12)


def test_with_advantages_per_token_the_token_form_learns_from_its_own():
    """GSPO-token, equation 17: the gradient of token t is s · A_t / |y|; the sequence form spreads the mean of A_t."""
    batch = Batch([[1, 0, 1, 1], [1]], seed=2, spread=0.05)
    weights = torch.tensor([1 / 3, 0, 1 / 3, 1 / 3, 1.0], dtype=torch.float64)
    grads = {}
    for token_form in (False, True):
        loss, clipped = gspo_token_loss(
            batch.new, batch.old, batch.token_advantages, 0.5, 0.5,
            mask_T=batch.mask, lengths=batch.lengths, token_form=token_form,
        )  # fmt: skip
        assert not clipped.any()
        grads[token_form] = torch.autograd.grad((loss * weights).sum(), batch.new)[0].tolist()
    new, old = batch.new.tolist(), batch.old.tolist()
    s = math.exp(sum(new[t] - old[t] for t in (0, 2, 3)) / 3)
    advantages = batch.token_advantages.tolist()
    assert [grads[True][t] for t in (0, 2, 3)] == pytest.approx([-s * advantages[t] / 3 for t in (0, 2, 3)])
    mean = sum(advantages[t] for t in (0, 2, 3)) / 3
    assert [grads[False][t] for t in (0, 2, 3)] == pytest.approx([-s * mean / 3] * 3)
    assert grads[True][1] == grads[False][1] == 0.0


def test_gradcheck():
    batch = Batch([[1, 0, 1], [], [1]], seed=5)
    options = {"mask_T": batch.mask, "lengths": batch.lengths}
    clean = batch.new.detach().nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda new: gspo_log_ratio(new, batch.old, **options), clean)


@pytest.mark.parametrize("token_form", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [30.0, -30.0, 1e4, -1e4, 1e15, -1e15])
def test_huge_and_tiny_ratios_stay_finite(size, dtype, token_form):
    new = torch.tensor([size, size, torch.nan, size], dtype=dtype, requires_grad=True)
    loss, clipped = gspo_token_loss(
        new, torch.zeros(4, dtype=dtype), torch.tensor([1.0, -1.0, torch.nan, -1e3], dtype=dtype), 0.2, 0.2,
        mask_T=torch.tensor([1, 1, 0, 1]), lengths=[3, 0, 1], token_form=token_form,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    assert grad.isfinite().all()
    assert loss[2].item() == 0
    assert not clipped[2]
    assert clipped[:2].tolist() == [size > 0, size < 0]


def test_old_log_probs_are_constants_and_bf16_is_summed_in_fp32():
    old = torch.full((4096,), -1.0, requires_grad=True)
    new = torch.full((4096,), -1.0078125, dtype=torch.bfloat16, requires_grad=True)
    ratios = gspo_log_ratio(new, old, mask_T=torch.ones(4096), lengths=[4096])
    ratios.sum().backward()
    assert old.grad is None
    assert ratios.tolist() == pytest.approx([-0.0078125] * 4096, rel=1e-6)


@pytest.mark.parametrize(
    ("lengths", "mask", "message"),
    [
        ([2], [1, 1, 1], "add up to 2 but there are 3"),
        ([3], [1, 1], r"one shape.*advantages_T \[3\], mask_T \[2\]$"),
    ],
)
def test_shapes_that_cannot_be(lengths, mask, message):
    three = torch.zeros(3)
    with pytest.raises(DataError, match=message):
        gspo_token_loss(three, three, three, 0.2, 0.2, mask_T=torch.tensor(mask), lengths=lengths)
