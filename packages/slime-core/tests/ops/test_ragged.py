from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops.tokens import expand, lengths_tensor, sequence_lengths, sequence_mean, sequence_sum

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
    assert sequence_lengths(3, values) == 3
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
