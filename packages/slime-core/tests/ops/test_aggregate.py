import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops import token_weights, trajectory_tokens

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


def test_narrow_types_still_count_every_token():
    """bf16 has no 257. What is given back is rounded once, at the end."""
    mask = [1] * 257
    exact = torch.tensor(1 / 257).bfloat16()
    ours = [
        token_weights([mask], global_samples=1, global_tokens=0, dtype=torch.bfloat16),
        token_weights([mask], global_samples=1, global_tokens=257, per_token=True, dtype=torch.bfloat16),
        token_weights([mask], trajectory_tokens=[257], global_samples=1, global_tokens=0, dtype=torch.bfloat16),
        token_weights([mask], divisor=257, global_samples=1, global_tokens=0, dtype=torch.bfloat16),
    ]
    assert all(weights.equal(exact.expand(257)) for weights in ours)


def test_a_part_without_samples_has_no_weights():
    for weights in (
        token_weights([], global_samples=2, global_tokens=3),
        token_weights([], global_samples=2, global_tokens=3, per_token=True),
        token_weights([], trajectory_tokens=[], global_samples=2, global_tokens=0),
        token_weights([], divisor=4, global_samples=2, global_tokens=0, dtype=torch.float64),
    ):
        assert weights.shape == (0,)
    assert weights.dtype == torch.float64


STEP = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3)), min_size=1, max_size=7)


@given(STEP, st.integers(0, 1000), st.data())
def test_per_trajectory_is_the_mean_over_trajectories_however_its_samples_are_split(step, seed, data):
    """A trajectory's samples in any order, apart, empty or wholly masked."""
    masks, ids = [mask for mask, _ in step], [trajectory for _, trajectory in step]
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist() for mask in masks]
    expected = 0.0
    for trajectory in set(ids):
        pairs = [
            (m, x)
            for mask, row, owner in zip(masks, values, ids, strict=True)
            for m, x in zip(mask, row, strict=True)
            if owner == trajectory
        ]
        expected += sum(m * x for m, x in pairs) / max(sum(m for m, _ in pairs), 1) / len(set(ids))
    counts = trajectory_tokens(masks, ids)
    order = data.draw(st.permutations(range(len(step))))
    cut = data.draw(st.integers(0, len(step)))
    total = 0.0
    for part in (order[:cut], order[cut:]):
        weights = token_weights(
            [masks[n] for n in part], trajectory_tokens=[counts[n] for n in part],
            global_samples=len(set(ids)), global_tokens=0, dtype=torch.float64,
        )  # fmt: skip
        flat = torch.tensor([x for n in part for x in values[n]], dtype=torch.float64)
        total += (weights * flat).sum().item()
    assert total == pytest.approx(expected, abs=1e-12)


def test_trajectory_ids_may_be_a_tensor():
    assert trajectory_tokens([[1, 1], [1, 0], [1, 1, 1]], torch.tensor([5, 6, 5])) == [5, 1, 5]


@given(MASKS.filter(bool))
def test_with_one_sample_per_trajectory_it_is_the_per_sample_mean(masks):
    counts = trajectory_tokens(masks, list(range(len(masks))))
    per_sample = token_weights(masks, global_samples=len(masks), global_tokens=0)
    sizes = {"global_samples": len(masks), "global_tokens": 0}
    assert token_weights(masks, trajectory_tokens=counts, **sizes).equal(per_sample)


@given(MASKS.filter(bool), st.integers(0, 1000), st.integers(1, 64), st.integers(0, 6))
def test_by_a_constant(masks, seed, divisor, cut):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist() for mask in masks]
    expected = sum(
        sum(m * x for m, x in zip(mask, row, strict=True)) / divisor / len(masks)
        for mask, row in zip(masks, values, strict=True)
    )
    parts = [
        token_weights(part, divisor=divisor, global_samples=len(masks), global_tokens=0, dtype=torch.float64)
        for part in (masks[:cut], masks[cut:])
    ]
    flat = torch.tensor([x for row in values for x in row], dtype=torch.float64)
    assert (torch.cat(parts) * flat).sum().item() == pytest.approx(expected, abs=1e-12)


def weights_of_one(samples, **how):
    return token_weights([[1]], global_samples=samples, global_tokens=0, **how)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trajectory_tokens([[1]], [0, 1]), "1 loss masks and 2 trajectory ids"),
        (lambda: weights_of_one(1, trajectory_tokens=[]), "1 loss masks and 0 token counts"),
        (lambda: weights_of_one(0, trajectory_tokens=[1]), "global_samples 0 must be"),
        (lambda: weights_of_one(1, divisor=0), "divisor 0 must be"),
        (lambda: weights_of_one(1, divisor=math.nan), "divisor nan must be"),
        (lambda: weights_of_one(1, divisor=math.inf), "divisor inf must be"),
        (lambda: weights_of_one(0, divisor=1), "global_samples 0 must be"),
    ],
)
def test_what_cannot_be_a_denominator(call, message):
    with pytest.raises(DataError, match=message):
        call()
