import math
import statistics

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops import estimator_named, policy_advantages, whiten


def by_a_loop(values, mask, eps=1e-8):
    kept = [v for v, m in zip(values.tolist(), mask.tolist(), strict=True) if m]
    if not kept:
        return [0.0] * len(values)
    mean = statistics.fmean(kept)
    variance = statistics.variance(kept) if len(kept) > 1 else 0.0
    return [(v - mean) / math.sqrt(variance + eps) if m else 0.0 for v, m in zip(values.tolist(), mask, strict=True)]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), max_size=20))
def test_equals_a_loop(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    mask = torch.tensor([kept for _, kept in rows], dtype=torch.bool)
    ours = whiten(values.masked_fill(~mask, torch.nan), mask)
    assert ours.tolist() == pytest.approx(by_a_loop(values, mask), rel=1e-7, abs=1e-7)


def test_the_result_has_mean_0_and_the_corrected_variance_1():
    whitened = whiten(torch.tensor([3.0, 5.0, 100.0]), torch.tensor([1, 1, 0]))
    assert whitened.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0])


def test_eps_types_and_gradient():
    values = torch.tensor([0.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    whitened = whiten(values, torch.ones(2), eps=2.0)
    assert whitened.tolist() == [-0.5, 0.5]  # variance 2
    assert whitened.dtype == torch.float32
    assert not whitened.requires_grad


def test_what_it_refuses():
    for eps in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"eps \S+ must be a finite number above 0"):
            whiten(torch.ones(2), torch.ones(2), eps=eps)
    with pytest.raises(DataError, match=r"values_T has shape \[2\], must be \[3\]"):
        whiten(torch.zeros(2), torch.ones(3))
    with pytest.raises(DataError, match=r"mask_T has shape \[2, 1\], must be \[2\]"):
        whiten(torch.zeros(2), torch.ones(2, 1))
    for bad in (math.nan, math.inf, 1e200):
        with pytest.raises(DataError, match="must be finite where the mask is 1"):
            whiten(torch.tensor([bad, 0.0], dtype=torch.float64), torch.ones(2))


# name: (tokens of each rank, share of them that is masked, what is added to all)
CASES = {
    "uneven": ((13, 4), 0.3, 0.0),
    "empty rank": ((9, 0), 0.0, 0.0),
    "both empty": ((0, 0), 0.0, 0.0),
    "all masked on one": ((6, 5), None, 0.0),
    "one token": ((1, 0), 0.0, 0.0),
    "far from zero": ((50, 70), 0.2, 1e6),
}


def tokens(name):
    """All ranks' values, NaN where masked, and masks."""
    counts, masked, offset = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randn(sum(counts), generator=generator, dtype=torch.float64) + offset
    mask = torch.ones(sum(counts)) if masked is None else torch.rand(sum(counts), generator=generator) >= masked
    if masked is None:
        mask[counts[0] :] = 0
    return values.masked_fill(mask == 0, torch.nan), mask, counts


def run_case(rank, name):
    values, mask, counts = tokens(name)
    return whiten(values.split(counts)[rank], mask.split(counts)[rank], group=dist.group.WORLD)


def whitened_returns(rewards, mask, lengths, group=None):
    return policy_advantages(
        AlgorithmConfig(normalize_advantages=True), rewards_N=rewards, mask_T=mask, lengths=lengths,
        estimator=estimator_named("reinforce_plus_plus", gamma=0.9), group=group,
    ).advantages_T  # fmt: skip


def run_estimator(rank):
    """Three responses: two on the first rank, one on the second, or all on the second."""
    rewards, mask, lengths = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1, 1, 0, 1, 1, 0.0]), [2, 1, 3]
    results = []
    for cut in (2, 0):
        mine = slice(0, cut) if rank == 0 else slice(cut, 3)
        start = sum(lengths[: mine.start])
        mask_T = mask[start : start + sum(lengths[mine])]
        results.append(whitened_returns(rewards[mine], mask_T, torch.tensor(lengths[mine]).long(), dist.group.WORLD))
    return results


def refusal(rank):
    """A NaN on the second rank is an error on both."""
    try:
        whiten(torch.tensor([1.0, 2.0 if rank == 0 else torch.nan]), torch.ones(2), group=dist.group.WORLD)
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CASES)
def test_split_over_ranks_equals_whole(two_ranks, name):
    values, mask, counts = tokens(name)
    parts = two_ranks(__file__, "run_case", name)
    joined = torch.cat(parts)
    assert [len(part) for part in parts] == list(counts)
    assert joined.tolist() == pytest.approx(whiten(values, mask).tolist(), rel=1e-9, abs=1e-9)
    assert joined.tolist() == pytest.approx(by_a_loop(values, mask), rel=1e-7, abs=1e-7)


def test_advantages_are_whitened_alike_wherever_the_responses_lie(two_ranks):
    whole = whitened_returns(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1, 1, 0, 1, 1, 0.0]), [2, 1, 3])
    for parts in zip(*two_ranks(__file__, "run_estimator"), strict=True):
        joined = torch.cat(parts)
        torch.testing.assert_close(joined, whole, rtol=1e-6, atol=1e-6)


def test_a_nan_on_one_rank_is_an_error_on_every_rank(two_ranks):
    for message in two_ranks(__file__, "refusal"):
        assert "are [0.5, nan]" in message
