import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import ESTIMATORS, AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.rewards import estimator_rewards, normalize_group_rewards
from slime_core.schedule import ShardSpec, beyond_whole_steps, build_shards, check_batch_sizes
from slime_core.types import RolloutBatch, Sample, Status
from slime_core.types.arrays import Ragged
from slime_core.types.routed import routed_text

GRPO = AlgorithmConfig()


def make_sample(index, group, *, prompt=4, response=3, reward=0.0, status=Status.COMPLETED, **fields):
    tokens = [100 + group] * prompt + list(range(response))
    return Sample(
        index=index, group_index=group, prompt="p", tokens=tokens, response_length=response, reward=reward,
        status=status, **fields,
    )  # fmt: skip


def make_batch(group_sizes, lengths=None, rewards=None, prompt=4):
    groups, index = [], 0
    for group, size in enumerate(group_sizes):
        groups.append([])
        for _ in range(size):
            groups[-1].append(
                make_sample(
                    index, group, prompt=prompt,
                    response=lengths[index] if lengths else 3,
                    reward=rewards[index] if rewards else float(index % 2),
                )
            )  # fmt: skip
            index += 1
    return RolloutBatch(rollout_id=3, groups=groups)


def _size(batch):
    return len(batch.samples if isinstance(batch, RolloutBatch) else batch.samples["index"])


def shards_of(batch, *, dp=1, mbs=1, gbs=None, **kwargs):
    kwargs = {"algorithm": GRPO, "global_batch_size": gbs or _size(batch)} | kwargs
    spec = ShardSpec(temperature=0.8, data_parallel_size=dp, micro_batch_size=mbs, **kwargs)
    return build_shards(batch, spec)


@st.composite
def workloads(draw):
    """Any rollout that the sizes divide, with groups of any size and order."""
    dp, mbs, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    gbs = dp * mbs * per_rank
    total = gbs * draw(st.integers(1, 3))
    sizes = []
    while sum(sizes) < total:
        sizes.append(min(draw(st.integers(1, 9)), total - sum(sizes)))
    lengths = draw(st.lists(st.integers(0, 50), min_size=total, max_size=total))
    return make_batch(sizes, lengths), {"dp": dp, "mbs": mbs, "gbs": gbs}


def test_the_former_signature_gives_the_same_with_a_warning():
    batch = make_batch([4, 4], [3, 5, 7, 2, 9, 1, 4, 6])
    fields = {"algorithm": GRPO, "temperature": 0.8, "data_parallel_size": 2, "micro_batch_size": 2}
    with pytest.warns(DeprecationWarning, match=r"is now build_shards\(batch, ShardSpec\(algorithm=…, …\)\)"):
        former = build_shards(batch, **fields, global_batch_size=8)
    assert pickle.dumps(former) == pickle.dumps(shards_of(batch, dp=2, mbs=2, gbs=8))
    with pytest.raises(TypeError, match="build_shards takes pairs as a part of its ShardSpec"):
        build_shards(batch, ShardSpec(**fields, global_batch_size=8), pairs=True)


@given(workloads(), st.booleans())
def test_invariants(workload, together):
    batch, sizes = workload
    shards = shards_of(batch, **sizes, keep_groups_together=together)
    assert len(shards) == sizes["dp"]
    assert pickle.dumps(shards) == pickle.dumps(shards_of(batch, **sizes, keep_groups_together=together))
    trained = [sample.index for shard in shards for sample in shard.samples]
    assert sorted(trained) == [sample.index for sample in batch.samples]
    for step in range(len(batch.samples) // sizes["gbs"]):
        steps = [shard.steps[step] for shard in shards]
        assert len({len(part.micro_batches) for part in steps}) == 1
        assert all(1 <= len(members) <= sizes["mbs"] for part in steps for members in part.micro_batches)
        members = [
            shard.samples[position]
            for shard, part in zip(shards, steps, strict=True)
            for micro_batch in part.micro_batches
            for position in micro_batch
        ]
        expected = range(step * sizes["gbs"], (step + 1) * sizes["gbs"])
        assert sorted(sample.index for sample in members) == list(expected)
        assert {part.global_trajectories for part in steps} == {sizes["gbs"]}
        assert {part.global_tokens for part in steps} == {sum(int(sample.loss_mask.sum()) for sample in members)}
    for shard in shards:
        placed = [position for part in shard.steps for members in part.micro_batches for position in members]
        assert placed == list(range(len(shard.samples)))
        assert (shard.rollout_id, shard.temperature) == (3, 0.8)


@given(workloads())
def test_single_samples_fill_the_ranks_evenly(workload):
    batch, sizes = workload
    for shard in shards_of(batch, **sizes):
        for step in shard.steps:
            assert [len(members) for members in step.micro_batches] == [sizes["mbs"]] * (
                sizes["gbs"] // sizes["dp"] // sizes["mbs"]
            )


@given(workloads(), st.booleans(), st.booleans(), st.data())
def test_what_trains_nothing_is_left_out_before_the_ranks_are_balanced(workload, together, dynamic, data):
    batch, sizes = workload
    for sample in batch.samples:
        sample.reward = float(data.draw(st.integers(0, 1)))
    limit = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60} if dynamic else {}
    how = {**sizes, **limit, "keep_groups_together": together}
    whole, chosen = shards_of(batch, **how), shards_of(batch, **how, drop_untrained=True)
    trained = {one.index for shard in whole for one in shard.samples if one.reward and one.loss_mask.any()}
    kept = [one.index for shard in chosen for one in shard.samples]
    assert sorted(kept) == sorted(trained)
    for shard, before in zip(chosen, whole, strict=True):
        for step, old in zip(shard.steps, before.steps, strict=True):
            assert (step.global_trajectories, step.global_tokens) == (old.global_trajectories, old.global_tokens)
            assert len(step.micro_batches) == len(chosen[0].steps[shard.steps.index(step)].micro_batches)
            assert dynamic or all(len(members) <= sizes["mbs"] for members in step.micro_batches)


@pytest.mark.parametrize("flags", [{"use_kl_loss": True}, {"entropy_coef": 0.1}, {"normalize_advantages": True}])
def test_rewards_of_zero_are_left_out_only_where_the_loss_ignores_them(flags):
    batch = make_batch([4], rewards=[1.0, 1.0, 1.0, 1.0])
    algorithm = AlgorithmConfig(**flags)
    [shard] = shards_of(batch, algorithm=algorithm, drop_untrained=True)
    assert [one.index for one in shard.samples] == [0, 1, 2, 3]
    [shard] = shards_of(batch, drop_untrained=True)
    assert shard.samples == [] and shard.steps[0].micro_batches == [[]]


def test_ranks_keep_pace_where_half_of_the_groups_train_nothing():
    """Lengths are log-normal; a group has equal rewards, or not."""
    draw = np.random.default_rng(0)
    lengths = [min(int(length), 16_000) for length in draw.lognormal(7, 1, 512)]
    rewards = [float(index % 2) if index // 8 % 2 else 1.0 for index in range(512)]
    limit = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20_000}
    batch = make_batch([8] * 64, lengths, rewards)
    loads = [sum(len(one.tokens) for one in s.samples) for s in shards_of(batch, dp=4, **limit, drop_untrained=True)]
    assert max(loads) / (sum(loads) / 4) < 1.03


def test_ranks_are_balanced_by_tokens():
    lengths = [100, 1, 1, 1, 50, 50, 1, 1]
    for shards in (shards_of(make_batch([8], lengths), dp=2, mbs=2), shards_of(make_batch([8], lengths), dp=2, mbs=4)):
        loads = [sum(sample.response_length for sample in shard.samples) for shard in shards]
        assert sorted(loads) == [102, 103]


def test_the_heaviest_micro_batch_comes_first():
    (shard,) = shards_of(make_batch([6], [1, 30, 2, 9, 4, 20]), mbs=1)
    assert [sample.response_length for sample in shard.samples] == [30, 20, 9, 4, 2, 1]


@pytest.mark.parametrize(("mbs", "count"), [(8, 2), (4, 4), (16, 1)])
def test_groups_stay_together(mbs, count):
    """Four prompts of eight samples over two ranks: whole groups per micro-batch, or as much of one as fits."""
    lengths = [1 + (7 * index) % 13 for index in range(32)]
    shards = shards_of(make_batch([8] * 4, lengths), dp=2, mbs=mbs, keep_groups_together=True)
    for shard in shards:
        (step,) = shard.steps
        assert len(step.micro_batches) == count
        for members in step.micro_batches:
            groups = [shard.samples[position].group_index for position in members]
            assert len(set(groups)) == max(1, mbs // 8)
            assert all(groups.count(group) == min(mbs, 8) for group in groups)


def test_uneven_groups_are_cut_no_more_than_needed_and_the_ranks_keep_pace():
    shards = shards_of(make_batch([6, 2, 4, 4]), dp=2, mbs=4, keep_groups_together=True)
    assert [len(shard.steps[0].micro_batches) for shard in shards] == [2, 2]
    held = sorted(
        sorted(shard.samples[position].group_index for position in members)
        for shard in shards
        for members in shard.steps[0].micro_batches
    )
    assert held == [[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]


def test_one_group_over_two_ranks_is_split():
    shards = shards_of(make_batch([8]), dp=2, mbs=4, keep_groups_together=True)
    assert [len(shard.samples) for shard in shards] == [4, 4]


def test_fewer_groups_than_ranks_can_share_makes_smaller_micro_batches():
    """Three groups on two ranks: one is cut, so that both run equally many micro-batches."""
    shards = shards_of(make_batch([4, 4, 4]), dp=2, mbs=6, keep_groups_together=True)
    sizes = [[len(members) for members in shard.steps[0].micro_batches] for shard in shards]
    assert sizes == [[4, 2], [4, 2]]


@pytest.mark.parametrize(
    ("flags", "subtract", "divide"),
    [
        ({}, True, True),
        ({"disable_grpo_std_normalization": True}, True, False),
        ({"disable_rewards_normalization": True}, False, False),
    ],
)
def test_rewards_are_normalised_per_group(flags, subtract, divide):
    rewards = [1.0, 0.0, 0.5, 3.0, 3.0, 2.0]
    (shard,) = shards_of(make_batch([4, 2], rewards=rewards), mbs=6, algorithm=AlgorithmConfig(**flags))
    expected = normalize_group_rewards(rewards, [0, 0, 0, 0, 1, 1], subtract_mean=subtract, divide_by_std=divide)
    by_index = sorted(shard.samples, key=lambda sample: sample.index)
    assert [sample.reward for sample in by_index] == expected
    assert [sample.raw_reward for sample in by_index] == rewards


def test_rewards_by_name_need_a_key():
    batch = RolloutBatch(rollout_id=0, groups=[[make_sample(0, 0, reward={"score": 1.0, "format": 0.0})]])
    assert shards_of(batch, reward_key="score")[0].samples[0].raw_reward == 1.0
    with pytest.raises(DataError, match="choose one with --reward-key"):
        shards_of(batch)


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
@pytest.mark.parametrize("reward", [None, 7.0, math.nan])
def test_aborted_and_failed_samples_count_but_train_nothing(status, reward):
    group = [
        make_sample(0, 0, reward=1.0),
        make_sample(1, 0, reward=0.0),
        make_sample(2, 0, reward=reward, status=status),
    ]
    batch = RolloutBatch(rollout_id=0, groups=[group])
    (shard,) = shards_of(batch, mbs=3)
    lost = next(sample for sample in shard.samples if sample.index == 2)
    assert (lost.loss_mask.tolist(), lost.reward) == ([0, 0, 0], 0.0)
    assert (shard.steps[0].global_trajectories, shard.steps[0].global_tokens) == (3, 6)
    kept = {sample.index: sample.reward for sample in shard.samples if sample.index < 2}
    assert [kept[0], kept[1]] == normalize_group_rewards([1.0, 0.0], [0, 0])


def test_a_sample_that_failed_before_tokenization_is_no_empty_sequence():
    lost = Sample(index=1, group_index=0, prompt="p", status=Status.FAILED)
    (shard,) = shards_of(RolloutBatch(rollout_id=0, groups=[[make_sample(0, 0), lost]]), mbs=2)
    assert {sample.index: sample.tokens.tolist() for sample in shard.samples}[1] == [0]


def test_masks_and_engine_log_probs_are_handed_on():
    sample = make_sample(0, 0, loss_mask=[1, 0, 1], rollout_log_probs=[-0.1, -0.2, -0.3])
    (shard,) = shards_of(RolloutBatch(rollout_id=0, groups=[[sample]]))
    assert shard.samples[0].loss_mask.tolist() == [1, 0, 1]
    assert shard.samples[0].rollout_log_probs.tolist() == np.float32([-0.1, -0.2, -0.3]).tolist()
    assert shard.steps[0].global_tokens == 2


def test_kept_tokens_become_extras():
    kept = make_sample(0, 0, loss_mask=[1, 0, 1], kept_tokens="5 9;;7;")
    (shard,) = shards_of(RolloutBatch(rollout_id=0, groups=[[kept, make_sample(1, 0)]]), gbs=2)
    first, second = sorted(shard.samples, key=lambda one: one.index)
    assert (first.extras["kept_ids"].tolist(), first.extras["kept_counts"].tolist()) == ([5, 9, 7], [2, 0, 1])
    assert (second.extras["kept_ids"], second.extras["kept_counts"]) == (None, None)


@pytest.mark.parametrize("kept", [None, "5 9;5;;"])
def test_trained_tokens_without_kept_tokens_are_refused_where_they_are_needed(kept):
    sample = make_sample(0, 0, loss_mask=[1, 0, 1], kept_tokens=kept)
    batch = RolloutBatch(rollout_id=0, groups=[[sample]])
    with pytest.raises(DataError, match=r"sample 0 does not say which tokens .*; generate it with Trajectory"):
        shards_of(batch, needs_kept=True)
    shards_of(batch)
    sample.loss_mask = [0, 1, 0] if kept else [0, 0, 0]
    shards_of(batch, needs_kept=True)


def test_the_engines_experts_become_extras():
    known = make_sample(0, 0, routed_experts="2x1:AAECAw==")
    wide = make_sample(1, 0, routed_experts="2x2:AAEAAg==", remove_sample=True)
    batch = RolloutBatch(rollout_id=0, groups=[[known, wide, make_sample(2, 0, remove_sample=True)]])
    known.loss_mask = [0, 0, 0]
    (shard,) = shards_of(batch, gbs=3, needs_experts=True)
    first, second, third = sorted(shard.samples, key=lambda one: one.index)
    assert first.extras["routed_experts"].tolist() == [[0, 1], [2, 3]]
    assert second.extras["routed_experts"].tolist() == [[256, 512]]
    assert third.extras["routed_experts"] is None
    (shard,) = shards_of(batch, gbs=3)
    assert not any("routed_experts" in one.extras for one in shard.samples), "they are large"
    other = make_sample(1, 0, routed_experts="1x1:AA==")
    with pytest.raises(DataError, match=r"samples have \[1, 2\] numbers per token in routed_experts; one model made"):
        shards_of(RolloutBatch(rollout_id=0, groups=[[known, other]]), gbs=2, needs_experts=True)


@pytest.mark.parametrize("rows", [None, 1])
def test_experts_up_to_the_last_trained_token_are_needed_where_they_are_replayed(rows):
    sample = make_sample(0, 0, loss_mask=[1, 1, 0], routed_experts=rows and "1x1:AA==")
    batch, prompt = RolloutBatch(rollout_id=0, groups=[[sample]]), len(sample.prompt_tokens)
    with pytest.raises(
        DataError, match=f"names the engine's experts for {rows or 0} tokens, .* for the {prompt + 1} before its last"
    ):
        shards_of(batch, needs_experts=True)
    shards_of(batch)
    sample.routed_experts = routed_text(np.zeros((prompt + 1, 1), np.int32))
    shards_of(batch, needs_experts=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_samples": 100, "global_batch_size": 64}, r"100 samples .* --global-batch-size 64; .* such as 50"),
        (
            {"num_samples": 20, "global_batch_size": 10},
            r"10 must be a multiple of data-parallel size 2 × .* 3 = 6; .* 12",
        ),
        ({"global_batch_size": 0}, "--global-batch-size 0 must be 1 or more"),
        ({"micro_batch_size": -1}, "--micro-batch-size -1 must be 1 or more"),
        ({"data_parallel_size": 0}, "data-parallel size 0 must be 1 or more"),
    ],
)
def test_sizes_that_do_not_divide(sizes, message):
    good = {"num_samples": 12, "global_batch_size": 6, "data_parallel_size": 2, "micro_batch_size": 3}
    check_batch_sizes(**good)
    with pytest.raises(ConfigError, match=message):
        check_batch_sizes(**(good | sizes))


def test_bad_data():
    with pytest.raises(DataError, match="rollout 3 has no samples"):
        shards_of(make_batch([]), gbs=1)
    with pytest.raises(DataError, match="sample 0 has no reward"):
        shards_of(RolloutBatch(rollout_id=0, groups=[[make_sample(0, 0, reward=None)]]))
    with pytest.raises(DataError, match=r"samples 0 \(nan\)"):
        shards_of(RolloutBatch(rollout_id=0, groups=[[make_sample(0, 0, reward=math.nan)]]))
    with pytest.raises(DataError, match="sample 0 has a response but no prompt tokens"):
        shards_of(RolloutBatch(rollout_id=0, groups=[[make_sample(0, 0, prompt=0)]]))
    with pytest.raises(
        ConfigError,
        match=r"3 samples .* steps of --global-batch-size 2; set it to a divisor of 3, such as 1",
    ):
        shards_of(make_batch([3]), gbs=2)


@pytest.mark.parametrize(
    ("size", "ranks", "left_out"),
    [(2, 1, [4]), (3, 1, [3, 4]), (5, 1, []), (8, 1, []), (2, 2, [4]), (4, 2, [4]), (8, 2, []), (8, 8, [])],
)
@pytest.mark.parametrize("dynamic", [{}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}])
def test_what_does_not_fill_a_rollouts_last_step_is_left_out(size, ranks, left_out, dynamic):
    """Of five trajectories; fewer than one step takes are one step, with a mean over as many as there are."""
    batch = make_batch([1, 2, 2])
    shards = shards_of(batch, gbs=size, dp=ranks, drop_rest=True, **dynamic)
    steps = [
        sorted(one.index for rank in shard_positions(shards, at) for own in rank for one in own if one.index >= 0)
        for at in range(len(shards[0].steps))
    ]
    kept = [at for at in range(5) if at not in left_out]
    assert steps == [kept[at : at + size] for at in range(0, len(kept), size)]
    assert [step.global_trajectories for step in shards[0].steps] == list(map(len, steps))
    assert beyond_whole_steps(batch.columns(), size) == left_out


def shard_positions(shards, step):
    """The samples of one step by rank and micro-batch."""
    return [
        [[shard.samples[at] for at in positions] for positions in shard.steps[step].micro_batches] for shard in shards
    ]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=24), st.integers(1, 3),
    st.integers(1, 60), st.booleans(), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_trajectories_stay_in_one_step(trajectories, dp, cap, dynamic, together, generator):
    """Trajectories of one to three samples, in any order; micro-batches are empty only where samples are too few."""
    steps = 2 if len(trajectories) % 2 == 0 and len(trajectories) // 2 >= dp else 1
    gbs = len(trajectories) // steps
    if gbs < dp or (not dynamic and gbs % dp):
        dp = 1
    samples = [
        make_sample(0, number % 4, response=length, trajectory_id=number)
        for number, (count, length) in enumerate(trajectories)
        for _ in range(count)
    ]
    generator.shuffle(samples)
    for index, sample in enumerate(samples):
        sample.index = index
    batch = RolloutBatch(rollout_id=3, groups=[samples])
    shards = shards_of(
        batch, dp=dp, gbs=gbs, keep_groups_together=together, use_dynamic_batch_size=dynamic,
        max_tokens_per_gpu=cap,
    )  # fmt: skip
    by_index = {sample.index: sample for sample in samples}
    trained = [sample.index for shard in shards for sample in shard.samples]
    assert sorted(trained) == sorted(by_index)
    seen = []
    for step in range(steps):
        ranks = shard_positions(shards, step)
        (count,) = {len(rank) for rank in ranks}
        real = [sample for rank in ranks for members in rank for sample in members]
        assert all(members for rank in ranks for members in rank) or len(real) < dp * count
        ids = {by_index[sample.index].trajectory_id for sample in real}
        assert len(ids) == gbs
        seen.append(ids)
        for shard in shards:
            assert shard.steps[step].global_trajectories == gbs
            assert shard.steps[step].global_tokens == sum(int(sample.loss_mask.sum()) for sample in real)
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_a_trajectory_id_of_none_is_the_index():
    samples = [make_sample(0, 0), make_sample(1, 0, trajectory_id=0), make_sample(2, 0), make_sample(3, 0)]
    (shard,) = shards_of(RolloutBatch(rollout_id=0, groups=[samples]), gbs=1)
    assert [step.global_trajectories for step in shard.steps] == [1, 1, 1]


def test_what_a_trajectory_shares_is_counted_over_all_its_samples():
    """Its trained tokens go with each of its samples; its reward counts once in the group's mean: 1/2, not 1/3."""
    group = [
        make_sample(0, 0, trajectory_id=7, response=2, reward=0.0),
        make_sample(1, 0, trajectory_id=7, response=3, reward=0.0, loss_mask=[1, 0, 1]),
        make_sample(2, 0, trajectory_id=8, response=4, reward=1.0),
    ]
    algorithm = AlgorithmConfig(disable_grpo_std_normalization=True)
    (shard,) = shards_of(RolloutBatch(rollout_id=0, groups=[group]), gbs=2, mbs=2, algorithm=algorithm)
    found = {sample.index: (sample.trajectory_tokens, sample.reward) for sample in shard.samples}
    assert found == {0: (4, -0.5), 1: (4, -0.5), 2: (4, 0.5)}
    assert (shard.steps[0].global_trajectories, shard.steps[0].global_tokens) == (2, 8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "flags", [{}, {"disable_grpo_std_normalization": True}, {"disable_rewards_normalization": True}]
)
def test_rewards_are_those_of_the_estimator(estimator, flags):
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 2.5, 4.0], [0, 0, 0, 1, 1, 1]
    algorithm = AlgorithmConfig(advantage_estimator=estimator, normalize_advantages=True, **flags)
    (shard,) = shards_of(make_batch([3, 3], rewards=rewards), algorithm=algorithm)
    expected = estimator_rewards(
        estimator, rewards, groups, normalize="disable_rewards_normalization" not in flags,
        divide_by_std="disable_grpo_std_normalization" not in flags,
    )  # fmt: skip
    assert [sample.reward for sample in sorted(shard.samples, key=lambda sample: sample.index)] == expected


def test_log_probs_of_engine_and_teacher_go_with_the_sample():
    sample = make_sample(0, 0, response=2, rollout_log_probs=[-1.0, -2.0], teacher_log_probs=[-0.5, -0.25])
    (shard,) = shards_of(RolloutBatch(rollout_id=0, groups=[[sample]]))
    assert shard.samples[0].rollout_log_probs.tolist() == [-1.0, -2.0]
    assert shard.samples[0].teacher_log_probs.tolist() == [-0.5, -0.25]


def test_extras_go_with_the_sample_and_its_views_stay_home():
    batch = RolloutBatch(rollout_id=0, groups=[[make_sample(number, 0, response=2) for number in range(3)]]).columns()
    extras = {
        "top_k": Ragged(np.arange(12).reshape(6, 2), np.array([2, 2, 2])),
        "image": np.array([5, 6, 7]),
        "sparse": Ragged(np.ones(2, np.float16), np.array([-1, 2, -1])),
    }
    shards = shards_of(dataclasses.replace(batch, samples=batch.samples | extras), dp=3)
    for shard in shards:
        (sample,) = shard.samples
        (again,) = pickle.loads(pickle.dumps(shard)).samples
        assert shard.samples is shard.samples and again is not sample
        for found in (sample, again):
            assert found.extras["top_k"].tolist() == [
                [4 * found.index, 4 * found.index + 1],
                [4 * found.index + 2, 4 * found.index + 3],
            ]
            assert found.extras["image"] == 5 + found.index
            assert (found.extras["sparse"] is None) == (found.index != 1)
            assert found.extras["weight_versions"].tolist() == []


def test_a_token_limit_makes_the_micro_batches():
    """8 + 7, 7 + 7 … tokens of prompt and response under 16, whatever --micro-batch-size says."""
    batch = make_batch([8], [4, 3, 3, 3, 3, 3, 3, 3])
    (shard,) = shards_of(batch, use_dynamic_batch_size=True, max_tokens_per_gpu=16)
    assert [len(positions) for positions in shard.steps[0].micro_batches] == [2, 2, 2, 2]
    (shard,) = shards_of(batch, use_dynamic_batch_size=True, max_tokens_per_gpu=16, context_parallel_size=2)
    assert [len(positions) for positions in shard.steps[0].micro_batches] == [4, 4]
    assert pickle.dumps(shards_of(batch, max_tokens_per_gpu=16)) == pickle.dumps(shards_of(batch))


def test_padding_for_context_parallelism_counts_against_the_limit():
    """A sample of 9 tokens is padded to 12: with seven of 8 it is above 2 × 32 tokens, though 9 + 7 × 7 are not."""
    (shard,) = shards_of(
        make_batch([8], [5, 3, 3, 3, 3, 3, 3, 3]), use_dynamic_batch_size=True, max_tokens_per_gpu=16,
        context_parallel_size=2,
    )  # fmt: skip
    assert [len(positions) for positions in shard.steps[0].micro_batches] == [3, 3, 2]


def test_ranks_are_balanced_by_the_cost_asked_for():
    """By tokens the long response needs three of the others with it; by a quadratic cost none but the least."""
    lengths = [60, 20, 20, 20, 20, 20, 20, 20]
    for limits in ({"mbs": 4}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1000}):
        shards = shards_of(make_batch([8], lengths), dp=2, cost=lambda tokens: tokens**2, **limits)
        loads = sorted(sum(len(sample.tokens) ** 2 for sample in shard.samples) for shard in shards)
        counts = sorted(len(shard.samples) for shard in shards)
        assert (loads, counts) == (
            ([4 * 576, 4096 + 3 * 576], [4, 4]) if "mbs" in limits else ([7 * 576, 4096], [1, 7])
        )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs a limit to go by; set --max-tokens-per-gpu"),
        ({"max_tokens_per_gpu": 0}, "--max-tokens-per-gpu 0 must be 1 or more"),
        ({"context_parallel_size": 0}, "context-parallel size 0 must be 1 or more"),
        ({"micro_batch_size": 4}, "6 must be .* size 2 × --micro-batch-size 4 = 8; set it to 8"),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9, "global_batch_size": 1},
            "leaves some micro-batches without a sample: there are 2 data-parallel ranks × 1 .* set it to 2 or more",
        ),
    ],
)
def test_sizes_that_leave_a_micro_batch_without_samples(sizes, message):
    good = {"num_samples": 12, "global_batch_size": 6, "data_parallel_size": 2, "micro_batch_size": 3}
    check_batch_sizes(**good, use_dynamic_batch_size=True, max_tokens_per_gpu=9)
    with pytest.raises(ConfigError, match=message):
        check_batch_sizes(**(good | sizes))


@pytest.mark.parametrize("limit", [{"mbs": 4}, {"mbs": 2}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20}])
@pytest.mark.parametrize("dp", [1, 2])
def test_both_samples_of_a_pair_are_in_one_micro_batch(dp, limit):
    """Also where the pair is above the token limit: 9 + 9 to 15 + 15 tokens under 20."""
    lengths = [5 + number // 2 % 7 for number in range(16)]
    batch = make_batch([2] * 8, lengths=lengths)
    batch.groups[3][0].train_metadata["margin"] = 1.5
    shards = shards_of(batch, dp=dp, gbs=8, pairs=True, **limit)
    seen = []
    for shard in shards:
        for step in shard.steps:
            assert len(step.micro_batches) == len(shards[0].steps[0].micro_batches)
            for positions in step.micro_batches:
                groups = [shard.samples[at].group_index for at in positions]
                assert all(groups.count(group) == 2 for group in groups)
                assert len(positions) <= limit.get("mbs", 2)
                seen += groups
    assert sorted(seen) == [number // 2 for number in range(16)]
    margins = {(s.group_index, s.raw_reward): s.extras["margin"] for shard in shards for s in shard.samples}
    assert margins[3, 0.0] == 1.5 and margins[3, 1.0] == margins[0, 0.0] == 0.0


@pytest.mark.parametrize(
    ("sizes", "rewards", "how", "error", "message"),
    [
        (
            [2, 2],
            None,
            {"mbs": 1},
            ConfigError,
            "--micro-batch-size 1 counts samples.* give an even number, such as 2",
        ),
        (
            *([2, 1], None, {"mbs": 2, "gbs": 3}, ConfigError),
            "--global-batch-size 3 counts samples, and preference pairs are two each; give an even number, such as 4",
        ),
        ([4], None, {"mbs": 2, "gbs": 2}, DataError, "group 0 is not a preference pair"),
        ([3, 1], None, {"mbs": 2}, DataError, "group 0 is not a preference pair: give it two samples"),
        ([2, 2], [1.0, 0.0, 1.0, 1.0], {"mbs": 2}, DataError, "group 1 is not a preference pair"),
    ],
)
def test_what_is_not_a_pair(sizes, rewards, how, error, message):
    with pytest.raises(error, match=message):
        shards_of(make_batch(sizes, rewards=rewards), pairs=True, **how)
