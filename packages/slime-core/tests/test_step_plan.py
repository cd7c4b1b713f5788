import itertools

from hypothesis import given
from hypothesis import strategies as st

from slime_core.context_parallel import padded_length
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
                    index=len(samples), group_index=group, tokens=[group] * prompt + [9] * length,
                    response_length=length, loss_mask=[1] * length, trajectory_tokens=length,
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
            tokens = sum(padded_length(len(samples[at].tokens), context_parallel_size=cp) for at in positions)
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


@given(GROUPS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 2))
def test_a_limit_of_samples_that_does_not_divide(groups, ranks, size, multiple):
    samples = make_samples(groups)
    planner = StepPlanner(
        samples=samples, ranks=ranks, limits=MicroBatchLimits(samples=size, multiple=multiple), by_group=True
    )
    plan = planner.plan(range(len(samples)))
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(samples)))
    (count,) = {len(micro_batches) for micro_batches in plan}
    assert count % multiple == 0
    for positions in itertools.chain(*plan):
        assert len(positions) <= size
        assert positions or len(samples) < ranks * count
