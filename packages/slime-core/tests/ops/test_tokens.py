from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops.tokens import (
    LIMIT,
    bounded_exp,
    bounded_expm1_minus,
    expand,
    lengths_tensor,
    masked,
    sequence_lengths,
    sequence_mean,
    sequence_sum,
    widen,
)


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_fp32(given, wide):
    assert widen(torch.ones(2, dtype=given)).dtype == wide


def test_what_is_masked_is_zero_without_gradient():
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    for mask in (torch.tensor([1, 0, 0]), torch.tensor([0.25, 0.0, 0.0]), torch.tensor([True, False, False])):
        (clean,) = masked(mask, values=values)
        assert clean.tolist() == [1.0, 0.0, 0.0]
        assert torch.autograd.grad(clean.exp().sum(), values)[0].tolist() == [pytest.approx(2.718281828), 0.0, 0.0]


def test_shapes_must_agree():
    with pytest.raises(DataError, match=r"one shape.*: a \[3\], b \[3, 1\]$"):
        masked(None, a=torch.zeros(3), b=torch.zeros(3, 1))
    with pytest.raises(DataError, match=r"a \[3\], mask_T \[2\]"):
        masked(torch.ones(2), a=torch.zeros(3))


FUNCTIONS = [(bounded_exp, math.exp), (bounded_expm1_minus, lambda x: math.expm1(x) - x)]


@pytest.mark.parametrize(("function", "reference"), FUNCTIONS)
def test_exact_up_to_the_limit(function, reference):
    x = torch.tensor([-800.0, -20.0, -1.0, -1e-3, 0.0, 1e-5, 1.0, LIMIT], dtype=torch.float64)
    assert function(x).tolist() == pytest.approx([reference(value) for value in x.tolist()], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("function", "reference"), FUNCTIONS)
def test_goes_on_along_its_tangent(function, reference):
    x = torch.tensor([LIMIT + 1, 1e4, torch.inf], requires_grad=True)
    y = function(x)
    slope = reference(LIMIT + 1e-6) - reference(LIMIT)
    assert y.tolist() == pytest.approx([reference(LIMIT) + slope * 1e6 * (v - LIMIT) for v in x.tolist()], rel=1e-5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.tolist() == pytest.approx([slope * 1e6] * 3, rel=1e-5)


def test_small_differences_keep_their_digits_in_fp32():
    """exp(x) - 1 - x is x²/2 there; the plain formula has no correct digit left."""
    x = torch.tensor([1e-2, -1e-2, 1e-3])
    assert bounded_expm1_minus(x).tolist() == pytest.approx([math.expm1(v) - v for v in x.tolist()], rel=1e-3)


LENGTHS = st.lists(st.integers(0, 5), max_size=6)


def tokens(lengths: list[int], seed: int) -> torch.Tensor:
    return torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(LENGTHS, st.integers(0, 99))
def test_sums_and_means_are_those_of_a_loop(lengths, seed):
    values, mask = tokens(lengths, seed), (tokens(lengths, seed + 1) > 0).long()
    counts = lengths_tensor(lengths, len(values))
    total, mean = sequence_sum(values, counts), sequence_mean(values, mask, counts)
    start = 0
    for number, length in enumerate(lengths):
        part, kept = values[start : start + length], mask[start : start + length].bool()
        assert total[number].item() == pytest.approx(sum(part.tolist()))
        chosen = part[kept].tolist()
        assert mean[number].item() == pytest.approx(sum(chosen) / len(chosen) if chosen else 0.0)
        start += length
    assert expand(total, counts).tolist() == [
        total[n].item() for n, length in enumerate(lengths) for _ in range(length)
    ]


def test_gradients():
    values, mask = tokens([2, 0, 3], 1).requires_grad_(), torch.tensor([1, 0, 1, 1, 0])
    counts = lengths_tensor([2, 0, 3], 5)
    assert torch.autograd.gradcheck(lambda x: sequence_sum(x, counts), values)
    assert torch.autograd.gradcheck(lambda x: sequence_mean(x, mask, counts), values)
    assert torch.autograd.gradcheck(lambda x: expand(sequence_sum(x, counts), counts), values)


def test_one_length_for_all_is_the_same_as_many():
    values, mask = tokens([3, 3, 3, 3], 1), (tokens([3, 3, 3, 3], 2) > 0).long()
    counts = lengths_tensor([3] * 4, 12)
    assert (sequence_lengths(3, values), sequence_lengths(1, values)) == (3, 1)
    torch.testing.assert_close(sequence_sum(values, 3), sequence_sum(values, counts))
    torch.testing.assert_close(sequence_mean(values, mask, 3), sequence_mean(values, mask, counts))
    assert expand(values[:4], 3).equal(expand(values[:4], counts))
    for wrong in (5, 0):
        with pytest.raises(DataError, match=f"12 tokens are not rows of {wrong}"):
            sequence_lengths(wrong, values)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2, -1], "0 or more"),
        ([2, 2], "add up to 4 but there are 3"),
        ([1.5, 1.5], r"whole numbers .* got \[1.5, 1.5\]"),
    ],
)
def test_lengths_that_cannot_be(lengths, message):
    with pytest.raises(DataError, match=message):
        lengths_tensor(lengths, 3)
