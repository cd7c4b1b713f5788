import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.ops.log_probs import RowStatistics, SoftmaxRows


def rows_of(logits, targets, first=0, *, block_rows=2):
    return SoftmaxRows(logits, targets - first, logits.shape[1], 1.0, block_rows)


@given(
    cuts=st.lists(st.integers(0, 12), max_size=4),
    scale=st.sampled_from([0.1, 30.0, 1e4]),
    seed=st.integers(0, 2**16),
    with_entropy=st.booleans(),
)
def test_parts_merge_into_the_whole_in_any_order(cuts, scale, seed, with_entropy):
    """RowStatistics of any pieces of the columns, some of them empty or all −inf, are those of one row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 12, generator=generator, dtype=torch.float64) * scale
    logits[0, :6] = -torch.inf
    targets = torch.tensor([7, 0, 11, 5, 6])
    edges = [0, *sorted(cuts), 12]
    pieces = [
        rows_of(logits[:, start:stop], targets, start).statistics(with_entropy=with_entropy)
        for start, stop in itertools.pairwise(edges)
    ]
    order = torch.randperm(len(pieces), generator=generator).tolist()
    merged = RowStatistics.of_nothing(torch.zeros(5, dtype=torch.bool), torch.float64, with_entropy=with_entropy)
    for index in order:
        merged = merged.merge(pieces[index])
    log_p = torch.log_softmax(logits, -1)
    log_probs, entropy, lse = merged.results()
    assert merged.seen.all()
    torch.testing.assert_close(log_probs, log_p[range(5), targets], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-12, atol=1e-12)
    if with_entropy:
        expected = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
        torch.testing.assert_close(entropy, expected, rtol=1e-9, atol=1e-9)
    else:
        assert entropy is None


def test_gradient_may_be_written_over_the_logits():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 6, 3, 3, 1])
    _, entropy, lse = rows_of(logits, targets).statistics(with_entropy=True).results()
    grad, grad_entropy = torch.linspace(-1, 1, 5), torch.linspace(2, 3, 5)
    apart = torch.empty_like(logits)
    rows_of(logits, targets).write_gradient(apart, grad, grad_entropy, lse, entropy)
    rows_of(logits, targets).write_gradient(logits, grad, grad_entropy, lse, entropy)
    assert apart.equal(logits)


@pytest.mark.parametrize("block_rows", [1, 3, 100])
def test_bias_and_temperature(block_rows):
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    rows = SoftmaxRows(logits, torch.tensor([0, 0, 1]), 2, 0.5, block_rows, bias=torch.tensor([1.0, 0.0]))
    log_probs, _, _ = rows.statistics(with_entropy=False).results()
    expected = [-math.log(2), -math.log1p(math.exp(-6)), -2 - math.log1p(math.exp(-2))]
    assert log_probs.tolist() == pytest.approx(expected, abs=1e-6)
