import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.schedule import FILLER_INDEX
from slime_core.schedule_report import schedule_report
from slime_core.types import TrainSample, TrainShard, TrainStep

COUNTS = st.integers(1, 3)


def make_sample(length):
    """A sample of so many tokens; 0 makes a filler."""
    return TrainSample(
        index=FILLER_INDEX if length == 0 else 1, group_index=0, tokens=[7] * max(1, length), response_length=0,
        loss_mask=[], trajectory_tokens=0, reward=0.0, raw_reward=0.0,
    )  # fmt: skip


def make_shards(ranks):
    """Lengths per rank, step, micro-batch."""
    shards = []
    for rank in ranks:
        shard = TrainShard(rollout_id=0, temperature=1.0, samples=[], steps=[])
        for step in rank:
            placed = []
            for lengths in step:
                first = len(shard.samples)
                shard.samples.extend(make_sample(length) for length in lengths)
                placed.append(list(range(first, len(shard.samples))))
            shard.steps.append(TrainStep(micro_batches=placed, global_trajectories=1, global_tokens=1))
        shards.append(shard)
    return shards


@st.composite
def workloads(draw):
    counts = draw(st.lists(COUNTS, min_size=1, max_size=3))
    lengths = st.lists(st.integers(1, 30), min_size=1, max_size=3)
    return [[[draw(lengths) for _ in range(count)] for count in counts] for _ in range(draw(COUNTS))]


def test_an_example_by_hand():
    """Two ranks, two micro-batches each: 8 + (3, 2) tokens against 6 + a filler; limit 2 × 4 = 8 tokens."""
    report = schedule_report(
        make_shards([[[[8], [3, 2]]], [[[6], [0]]]]), max_tokens_per_gpu=4, context_parallel_size=2, pipeline_size=2
    )
    padded = 8 + 4 + 4 + 8 + 4
    bubbles = 8 + 6
    assert report == pytest.approx(
        {
            "steps": 1,
            "micro_batches": 2,
            "empty_micro_batches": 1,
            "tokens": 19,
            "padding_ratio": 1 - 19 / padded,
            "cap_use": padded / 4 / 8,
            "over_long_samples": 0,
            "rank_imbalance": 13 / 10 - 1,
            "rank_over_bound": 13 / 10 - 1,
            "micro_batch_imbalance": (8 + 5) / 10 - 1,
            "bubble_ratio": bubbles / (20 + bubbles),
            "idle_ratio": 1 - 20 / (2 * (13 + 8)),
        }
    )


def test_a_sample_above_the_mean_load_is_its_ranks_bound():
    report = schedule_report(make_shards([[[[90], [1]]], [[[5], [4]]]]), max_tokens_per_gpu=50)
    assert report["rank_imbalance"] == pytest.approx(91 / 50 - 1)
    assert report["rank_over_bound"] == pytest.approx(91 / 90 - 1)
    assert report["over_long_samples"] == 1


def pipeline_seconds(times, stages):
    """When the last stage ends: a stage takes a micro-batch when it and the stage before are done with it."""
    done = [0.0] * (stages + 1)
    for seconds in times:
        done[0] = 0.0
        for stage in range(1, stages + 1):
            done[stage] = max(done[stage], done[stage - 1]) + seconds
    return done[stages]


@given(workloads(), st.integers(1, 5))
def test_bubbles_against_a_pipeline_played_through(ranks, stages):
    report = schedule_report(make_shards(ranks), pipeline_size=stages)
    work = busy = slowest = 0.0
    for number in range(len(ranks[0])):
        times = [[sum(lengths) for lengths in rank[number]] for rank in ranks]
        ends = [pipeline_seconds(rank, stages) for rank in times]
        work += sum(map(sum, times))
        busy += sum(ends)
        slowest += max(ends) * len(ranks)
    assert report["bubble_ratio"] == pytest.approx(1 - work / busy, abs=1e-12)
    assert report["idle_ratio"] == pytest.approx(1 - work / slowest, abs=1e-12)


@pytest.mark.parametrize(("stages", "virtual", "count"), [(4, 1, 8), (4, 2, 8), (8, 3, 16), (1, 1, 3)])
def test_bubbles_of_equal_micro_batches(stages, virtual, count):
    """Narayanan et al. 2021, section 2.2: bubble over ideal time = (p - 1) / (v m)."""
    report = schedule_report(make_shards([[[[5]] * count]]), pipeline_size=stages, virtual_pipeline_size=virtual)
    share = report["bubble_ratio"]
    assert share / (1 - share) == pytest.approx((stages - 1) / (virtual * count))


@given(workloads(), st.integers(1, 3), st.integers(1, 3))
def test_padding_against_a_loop(ranks, cp, multiple):
    unit = multiple * (2 * cp if cp > 1 else 1)
    lengths = [length for rank in ranks for step in rank for micro_batch in step for length in micro_batch]
    report = schedule_report(make_shards(ranks), context_parallel_size=cp, pad_multiple=multiple)
    padded = sum(math.ceil(length / unit) * unit for length in lengths)
    assert report["tokens"] == sum(lengths)
    assert report["padding_ratio"] == pytest.approx(1 - sum(lengths) / padded, abs=1e-12)


@given(workloads())
def test_ratios_against_loops_in_flops(ranks):
    def cost(tokens):
        return tokens + tokens**2

    report = schedule_report(make_shards(ranks), cost=cost)
    heaviest = mean = lockstep = 0.0
    for number in range(len(ranks[0])):
        loads = [[sum(map(cost, lengths)) for lengths in rank[number]] for rank in ranks]
        heaviest += max(map(sum, loads))
        mean += sum(map(sum, loads)) / len(ranks)
        lockstep += sum(max(rank[at] for rank in loads) for at in range(len(loads[0])))
    assert report["rank_imbalance"] == pytest.approx(heaviest / mean - 1, abs=1e-12)
    assert report["micro_batch_imbalance"] == pytest.approx(lockstep / mean - 1, abs=1e-12)
    assert report["bubble_ratio"] == 0


def test_nothing_to_do_loses_nothing():
    report = schedule_report(make_shards([[[]], [[]]]), pipeline_size=4, max_tokens_per_gpu=5)
    assert report["idle_ratio"] == report["padding_ratio"] == report["cap_use"] == report["rank_imbalance"] == 0


def test_bad_arguments():
    with pytest.raises(DataError, match="equally many steps and micro-batches"):
        schedule_report(make_shards([[[[1]]], [[[1], [1]]]]))
    with pytest.raises(DataError, match="equally many steps"):
        schedule_report([])
    with pytest.raises(ConfigError, match="pipeline size 0 must be 1 or more"):
        schedule_report(make_shards([[[[1]]]]), pipeline_size=0)
    with pytest.raises(ConfigError, match="virtual-pipeline size 0 must be 1 or more"):
        schedule_report(make_shards([[[[1]]]]), virtual_pipeline_size=0)
