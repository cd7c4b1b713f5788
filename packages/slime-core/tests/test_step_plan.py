import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError
from slime_core.micro_batches import MicroBatchLimits
from slime_core.step_plan import StepPlanner
from slime_core.types import TrainSample


def make_samples(groups):
    """Groups given as (prompt length, response lengths)."""
    samples = []
    for group, (prompt, responses) in enumerate(groups):
        for length in responses:
            samples.append(
                TrainSample(
                    index=len(samples), group_index=group, tokens=np.array([group] * prompt + [9] * length),
                    response_length=length, loss_mask=np.ones(length, np.uint8), trajectory_tokens=length,
                    reward=0.0, raw_reward=0.0,
                )
            )  # fmt: skip
    return samples


def shared_tokens(samples, positions):
    """Tokens of a micro-batch whose samples compute the prompt of their group once."""
    prompts = {samples[at].group_index: samples[at].prompt_length for at in positions}
    return sum(prompts.values()) + sum(samples[at].response_length for at in positions)


GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=8
)


@given(GROUPS, st.integers(1, 4), st.integers(1, 100), st.booleans(), st.integers(1, 3), st.integers(1, 3))
def test_invariants_under_a_token_limit(groups, ranks, cap, by_group, multiple, cp):
    samples = make_samples(groups)
    planner = StepPlanner(
        samples=samples, ranks=ranks, limits=MicroBatchLimits(tokens=cap * cp, multiple=multiple), by_group=by_group,
        cost=lambda tokens: tokens + tokens * tokens / 10, context_parallel_size=cp,
    )  # fmt: skip
    plan = planner.plan(range(len(samples)))
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(samples)))
    (count,) = {len(micro_batches) for micro_batches in plan}
    assert count % multiple == 0
    for positions in itertools.chain(*plan):
        assert positions or len(samples) < ranks * count
        if cp == 1:
            tokens = shared_tokens(samples, positions)
        else:
            tokens = sum(-(-len(samples[at].tokens) // (2 * cp)) * 2 * cp for at in positions)
        assert tokens <= cap * cp or len(positions) == 1


def test_groups_fill_a_token_limit_with_their_prompt_counted_once():
    """Four groups of 10 + 4 × 5 tokens: two of them make 60, where eight samples of 15 tokens would make 120."""
    samples = make_samples([(10, [5, 5, 5, 5])] * 4)
    planner = StepPlanner(samples=samples, ranks=2, limits=MicroBatchLimits(tokens=60), by_group=True)
    for (positions,) in planner.plan(range(16)):
        assert len(positions) == 8
        assert len({samples[at].group_index for at in positions}) == 2
    apart = StepPlanner(samples=samples, ranks=2, limits=MicroBatchLimits(tokens=60))
    assert [len(rank) for rank in apart.plan(range(16))] == [2, 2]


def test_a_group_above_the_limit_is_cut_and_too_few_groups_fall_apart():
    samples = make_samples([(10, [20] * 6)])
    planner = StepPlanner(samples=samples, ranks=1, limits=MicroBatchLimits(tokens=50), by_group=True)
    assert sorted(planner.plan(range(6))[0]) == [[0, 1], [2, 3], [4, 5]]
    samples = make_samples([(10, [2] * 6)])
    planner = StepPlanner(samples=samples, ranks=2, limits=MicroBatchLimits(tokens=100), by_group=True)
    assert sorted(len(positions) for rank in planner.plan(range(6)) for positions in rank) == [3, 3]


def test_a_shared_prompt_costs_once_whatever_the_cost():
    """f(prompt) + the responses' parts f(all) - f(prompt), against the sums written out."""
    samples = make_samples([(3, [1, 2]), (4, [5])])
    planner = StepPlanner(samples=samples, ranks=1, limits=MicroBatchLimits(samples=1), cost=lambda n: n * n)
    assert planner.cost_of([0, 1, 2]) == 9 + (16 - 9) + (25 - 9) + 81
    assert planner.cost_of([2]) == 81


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_a_limit_of_samples_that_does_not_divide(groups, ranks, size, multiple, by_group):
    samples = make_samples(groups)
    planner = StepPlanner(
        samples=samples, ranks=ranks, limits=MicroBatchLimits(samples=size, multiple=multiple), by_group=by_group
    )
    plan = planner.plan(range(len(samples)))
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(samples)))
    (count,) = {len(micro_batches) for micro_batches in plan}
    assert count % multiple == 0
    for positions in itertools.chain(*plan):
        assert len(positions) <= size
        assert positions or len(samples) < ranks * count


def test_groups_under_a_limit_of_samples():
    """Pieces of 3 + 1, 3 and 2 samples in micro-batches of 3: 9 samples fill three, but a piece of 2 and one of 1."""
    samples = make_samples([(5, [1] * 4), (5, [2] * 3), (5, [3] * 2)])
    planner = StepPlanner(samples=samples, ranks=1, limits=MicroBatchLimits(samples=3), by_group=True)
    assert sorted(planner.plan(range(9))[0]) == [[0, 1, 2], [3, 7, 8], [4, 5, 6]]


def test_groups_of_many_sizes_are_balanced_and_fill_their_micro_batches():
    generator = random.Random(0)
    groups = [(generator.randint(1, 50), [generator.randint(1, 200)] * generator.randint(1, 8)) for _ in range(200)]
    samples = make_samples(groups)
    planner = StepPlanner(samples=samples, ranks=4, limits=MicroBatchLimits(samples=8), by_group=True)
    plan = planner.plan(range(len(samples)))
    loads = [sum(map(planner.cost_of, micro_batches)) for micro_batches in plan]
    assert max(loads) < 1.002 * sum(loads) / 4
    assert len(plan[0]) <= 1.1 * len(samples) / 8 / 4 + 1
    for micro_batches in plan:
        costs = [planner.cost_of(positions) for positions in micro_batches]
        assert costs == sorted(costs, reverse=True)
    for group in range(len(groups)):  # at most 8 samples, so each group is whole
        assert sum(any(samples[at].group_index == group for at in members) for micro in plan for members in micro) == 1


def test_both_limits_and_whole_groups_are_refused():
    with pytest.raises(ConfigError, match="under a limit of samples or of tokens; got both"):
        StepPlanner(samples=[], ranks=1, limits=MicroBatchLimits(samples=1, tokens=1), by_group=True)
