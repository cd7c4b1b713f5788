import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops import log_probs_and_entropy, sft_objective, token_weights

MASKS = st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=5)


@given(MASKS, st.integers(0, 2**16), st.booleans(), st.integers(0, 5))
def test_is_the_mean_cross_entropy_however_it_is_split(masks, seed, per_token, cut):
    """Against log-softmax token by token; NaN logits wherever the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(map(sum, masks))
    flat = torch.tensor([m for mask in masks for m in mask], dtype=torch.bool)
    log_probs = -torch.rand(len(flat), generator=generator, dtype=torch.float64)
    log_probs = log_probs.masked_fill(~flat, torch.nan).requires_grad_()
    expected, slopes, start = 0.0, [], 0
    for mask in masks:
        scale = 1 / max(tokens, 1) if per_token else 1 / max(sum(mask), 1) / len(masks)
        expected -= sum(scale * log_probs[start + t].item() for t, m in enumerate(mask) if m)
        slopes += [-scale * m for m in mask]
        start += len(mask)

    def objective(part, rows):
        weights = token_weights(
            part, global_samples=len(masks), global_tokens=tokens, per_token=per_token, dtype=torch.float64
        )
        return sft_objective(log_probs[rows], weights)

    whole, metrics = objective(masks, slice(None))
    assert whole.item() == metrics["loss"].item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.grad(whole, log_probs)[0].tolist() == pytest.approx(slopes)
    at = sum(len(mask) for mask in masks[:cut])
    parts = [objective(masks[:cut], slice(at)), objective(masks[cut:], slice(at, None))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(expected, abs=1e-12)


def test_from_logits_it_is_pytorchs_cross_entropy():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    targets, mask = torch.tensor([1, 8, 0, 3, 3, 5]), torch.tensor([1, 1, 0, 1, 0, 1])
    weights = token_weights([mask], global_samples=1, global_tokens=4, per_token=True, dtype=torch.float64)
    loss, _ = sft_objective(log_probs_and_entropy(logits, targets)[0], weights)
    other = torch.nn.functional.cross_entropy(logits, targets.masked_fill(mask == 0, -100))
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(other, logits))


def test_bf16_is_summed_in_fp32_and_shapes_must_agree():
    log_probs = torch.full((4096,), -1.0078125, dtype=torch.bfloat16)
    assert sft_objective(log_probs, torch.ones(4096))[0].item() == 4096 * 1.0078125
    with pytest.raises(DataError, match="one shape"):
        sft_objective(torch.zeros(3), torch.zeros(4))
