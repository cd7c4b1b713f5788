import importlib.util
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops import AdvantageInputs, Discounted, compute_advantages, whiten

WORKER = Path(__file__).with_name("whitening_worker.py")
spec = importlib.util.spec_from_file_location("whitening_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


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
    with pytest.raises(DataError, match=r"values_T has shape \[2\], must be \[3\]"):
        whiten(torch.zeros(2), torch.ones(3))
    for bad in (math.nan, math.inf, 1e200):
        with pytest.raises(DataError, match="must be finite where the mask is 1"):
            whiten(torch.tensor([bad, 0.0], dtype=torch.float64), torch.ones(2))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two gloo processes computed, each with a part of the tokens."""
    folder = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, str(WORKER), str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", worker.CASES)
def test_split_over_ranks_equals_whole(two_ranks, name):
    values, mask, counts = worker.tokens(name)
    joined = torch.cat([rank[name] for rank in two_ranks])
    assert [len(rank[name]) for rank in two_ranks] == list(counts)
    assert joined.tolist() == pytest.approx(whiten(values, mask).tolist(), rel=1e-9, abs=1e-9)
    assert joined.tolist() == pytest.approx(by_a_loop(values, mask), rel=1e-7, abs=1e-7)


def test_advantages_are_whitened_alike_wherever_the_responses_lie(two_ranks):
    whole = compute_advantages(
        AdvantageInputs(
            rewards_N=torch.tensor([1.0, -2.0, 0.5]),
            mask_T=torch.tensor([1, 1, 0, 1, 1, 0.0]),
            lengths_N=torch.tensor([2, 1, 3]),
        ),
        Discounted(0.9),
        whitened=True,
    )
    for split in range(2):
        joined = torch.cat([rank["estimator"][split] for rank in two_ranks])
        torch.testing.assert_close(joined, whole.advantages_T, rtol=1e-6, atol=1e-6)


def test_a_nan_on_one_rank_is_an_error_on_every_rank(two_ranks):
    for rank in two_ranks:
        assert "are [0.5, nan]" in rank["refusal"]
