import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops import token_weights

MASKS = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6)


def by_the_definition(masks, values, per_token):
    total, tokens = 0.0, sum(sum(mask) for mask in masks)
    for mask, row in zip(masks, values, strict=True):
        masked = sum(m * x for m, x in zip(mask, row, strict=True))
        total += masked / max(tokens, 1) if per_token else masked / max(sum(mask), 1) / len(masks)
    return total


@given(MASKS.filter(bool), st.booleans(), st.integers(0, 1000))
def test_the_weighted_sum_is_the_mean(masks, per_token, seed):
    """Ragged responses, empty ones and wholly masked ones included."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist() for mask in masks]
    tokens = sum(map(sum, masks))
    weights = token_weights(
        masks, global_samples=len(masks), global_tokens=tokens, per_token=per_token, dtype=torch.float64
    )
    flat = torch.tensor([x for row in values for x in row], dtype=torch.float64)
    assert (weights * flat).sum().item() == pytest.approx(by_the_definition(masks, values, per_token), abs=1e-12)


@given(MASKS.filter(bool), st.booleans(), st.data())
def test_parts_of_a_step_have_the_weights_of_the_whole(masks, per_token, data):
    cut = data.draw(st.integers(0, len(masks)))
    sizes = {"global_samples": len(masks), "global_tokens": sum(map(sum, masks)), "per_token": per_token}
    parts = [token_weights(part, **sizes) for part in (masks[:cut], masks[cut:])]
    assert torch.cat(parts).equal(token_weights(masks, **sizes))


def test_tensor_masks_and_a_bad_denominator():
    weights = token_weights([torch.tensor([1, 0, 1])], global_samples=4, global_tokens=2, per_token=False)
    assert weights.tolist() == [0.125, 0.0, 0.125]
    with pytest.raises(DataError, match="global_samples 0 must be 1 or more"):
        token_weights([[1]], global_samples=0, global_tokens=1, per_token=False)
