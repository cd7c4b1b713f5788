import itertools
import math
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.balance import lower_bound, try_balance
from slime_core.errors import ConfigError, DataError
from slime_core.flops import FlopsModel
from slime_core.micro_batches import MicroBatchLimits, plan_micro_batches

FLOPS = FlopsModel(
    num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8, head_dim=128
)
LIMITS = st.builds(
    MicroBatchLimits, samples=st.none() | st.integers(1, 6), tokens=st.integers(1, 120), multiple=st.integers(1, 3)
) | st.builds(MicroBatchLimits, samples=st.integers(1, 6), multiple=st.integers(1, 3))


def log_normal(count, seed=0, median=2000):
    generator = random.Random(seed)
    return [min(16_384, max(1, round(generator.lognormvariate(math.log(median), 1)))) for _ in range(count)]


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 5), LIMITS, st.booleans())
def test_invariants(tokens, ranks, limits, by_flops):
    costs = [FLOPS.training(count) for count in tokens] if by_flops else tokens
    plan = plan_micro_batches(tokens, ranks=ranks, limits=limits, costs=costs)
    assert len(plan) == ranks
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(tokens)))
    (count,) = {len(micro_batches) for micro_batches in plan}
    assert count >= 1
    assert count % limits.multiple == 0
    for micro_batches in plan:
        for positions in micro_batches:
            assert positions == sorted(positions)
            assert limits.samples is None or len(positions) <= limits.samples
            assert limits.tokens is None or len(positions) <= 1 or sum(tokens[at] for at in positions) <= limits.tokens
            assert positions or len(tokens) < ranks * count
        loads = [sum(costs[at] for at in positions) for positions in micro_batches]
        assert loads == sorted(loads, reverse=True)
    assert plan == plan_micro_batches(tokens, ranks=ranks, limits=limits, costs=costs)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 5), st.integers(100, 300))
def test_no_more_micro_batches_than_a_greedy_packing_needs(tokens, ranks, cap):
    """Whatever the plan puts on the fullest rank, first fit by falling length packs it into as few or more."""
    plan = plan_micro_batches(tokens, ranks=ranks, limits=MicroBatchLimits(tokens=cap))
    needed = []
    for micro_batches in plan:
        bins = []
        for length in sorted((tokens[at] for positions in micro_batches for at in positions), reverse=True):
            fitting = next((bin_ for bin_ in bins if sum(bin_) + length <= cap), None)
            if fitting is None:
                bins.append([length])
            else:
                fitting.append(length)
        needed.append(len(bins))
    ideal = -(-sum(tokens) // (cap * ranks))
    assert ideal <= len(plan[0]) <= max(1, ideal, *needed)


@pytest.mark.parametrize("by_flops", [False, True])
@pytest.mark.parametrize("largest", [None, 2.0])
@pytest.mark.parametrize("limits", [MicroBatchLimits(tokens=16_384), MicroBatchLimits(tokens=32_768, multiple=4)])
def test_8192_samples_on_64_ranks_come_within_1_percent(limits, largest, by_flops):
    """Also where one sample outweighs the mean rank: its rank fills its other micro-batches with the lightest."""
    tokens = log_normal(8192)
    if largest is not None:
        tokens[100] = round(largest * sum(tokens) / 64)
    costs = [FLOPS.training(count) for count in tokens] if by_flops else tokens
    plan = plan_micro_batches(tokens, ranks=64, limits=limits, costs=costs)
    heaviest = max(sum(costs[at] for positions in micro_batches for at in positions) for micro_batches in plan)
    assert heaviest <= 1.01 * lower_bound(costs, 64)
    assert all(itertools.chain(*plan))
    if largest is None:
        fewest = math.ceil(sum(tokens) / 64 / limits.tokens)
        assert len(plan[0]) in (limits.round_up(fewest), limits.round_up(fewest + 1))


def test_flops_and_tokens_balance_differently():
    """One long sample costs as much as all short ones together."""
    tokens = [8000] + [1000] * 14
    limits = MicroBatchLimits(samples=20)
    by_tokens, by_flops = (
        plan_micro_batches(tokens, ranks=2, limits=limits, costs=costs)
        for costs in (None, [count * count for count in tokens])
    )
    assert [len(rank[0]) for rank in by_tokens] == [4, 11]
    assert [len(rank[0]) for rank in by_flops] == [1, 14]


def test_a_longer_sample_is_alone():
    (rank,) = plan_micro_batches([5, 30, 5, 40, 5], ranks=1, limits=MicroBatchLimits(tokens=20))
    assert rank == [[3], [1], [0, 2, 4]]


def test_micro_batches_are_split_up_to_the_multiple():
    (rank,) = plan_micro_batches([4, 3, 2, 1, 1, 1], ranks=1, limits=MicroBatchLimits(tokens=100, multiple=4))
    assert [sum([4, 3, 2, 1, 1, 1][at] for at in positions) for positions in rank] == [4, 3, 3, 2]


def test_a_packing_that_only_first_fit_finds():
    """4 + 4 and 3 + 3 + 2 fill two micro-batches; largest first into the lightest starts 4 + 3 and 4 + 3."""
    tokens = [4, 4, 3, 3, 2]
    assert try_balance(tokens, 2, max_size=8) is None
    (rank,) = plan_micro_batches(tokens, ranks=1, limits=MicroBatchLimits(tokens=8))
    assert sorted(rank) == [[0, 1], [2, 3, 4]]


def test_a_first_fit_packing_is_split_up_to_the_multiple():
    """The five small samples cost most and spread over all four micro-batches, where the large one finds no room."""
    (rank,) = plan_micro_batches(
        [8, 1, 1, 1, 1, 1], ranks=1, limits=MicroBatchLimits(tokens=8, multiple=4), costs=[1, 9, 9, 9, 9, 9]
    )
    assert sorted(map(len, rank)) == [1, 1, 2, 2]
    assert [0] in rank


def test_samples_without_cost_fill_every_micro_batch():
    (rank,) = plan_micro_batches([5] * 6, ranks=1, limits=MicroBatchLimits(tokens=100, multiple=3), costs=[0.0] * 6)
    assert all(rank)


def test_too_few_samples_leave_micro_batches_empty():
    plan = plan_micro_batches([9] * 10, ranks=4, limits=MicroBatchLimits(tokens=10))
    assert sorted([len(positions) for positions in rank] for rank in plan) == [[1, 1, 0]] * 2 + [[1, 1, 1]] * 2
    assert plan_micro_batches([], ranks=2, limits=MicroBatchLimits(tokens=10, multiple=2)) == [[[], []]] * 2


def test_another_process_makes_the_same_plan():
    program = (
        "from slime_core.micro_batches import *; import random; generator = random.Random(3);"
        "tokens = [generator.randint(1, 900) for _ in range(300)];"
        "print(plan_micro_batches(tokens, ranks=8, limits=MicroBatchLimits(tokens=2000, multiple=2)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_bad_arguments():
    with pytest.raises(ConfigError, match="micro-batches need a limit; give samples or tokens"):
        MicroBatchLimits()
    for name in ("samples", "tokens", "multiple"):
        with pytest.raises(ConfigError, match=f"{name} 0 of the micro-batch limits must be 1 or more"):
            MicroBatchLimits(**{"samples": 1, name: 0})
    with pytest.raises(ConfigError, match="for 0 ranks; give 1 or more"):
        plan_micro_batches([1], ranks=0, limits=MicroBatchLimits(samples=1))
    with pytest.raises(DataError, match="1 costs for 2 samples"):
        plan_micro_batches([1, 2], ranks=1, limits=MicroBatchLimits(samples=1), costs=[1.0])
