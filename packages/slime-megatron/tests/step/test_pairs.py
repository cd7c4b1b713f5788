"""Preference pairs in order, and the one place of each response whose number is its score."""

import numpy as np
import pytest

from slime_core.errors import DataError
from slime_core.types import TrainSample, TrainShard, TrainStep
from slime_megatron.step.pairs import margins, paired, score_row, scored


def shard_of(*given, micro_batches):
    """A shard of samples, each a group, a raw reward and a mask of two prompt tokens' response."""
    samples = [
        TrainSample(
            index=index,
            group_index=group,
            tokens=np.arange(10 * index, 10 * index + 2 + len(mask), dtype=np.int32),
            response_length=len(mask),
            loss_mask=np.array(mask, np.uint8),
            trajectory_tokens=sum(mask),
            reward=reward,
            raw_reward=reward,
            extras=extras,
        )
        for index, (group, reward, mask, extras) in enumerate(given)
    ]
    step = TrainStep(micro_batches=micro_batches, global_trajectories=len(samples), global_tokens=4)
    return TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])


def test_the_chosen_one_comes_first_and_pairs_stay_together():
    given = [(0, 0.0, [1], {}), (1, 2.0, [1], {}), (0, 1.0, [1], {}), (1, -1.0, [1], {})]
    [step] = paired(shard_of(*given, micro_batches=[[0, 1, 2, 3], []])).steps
    assert step.micro_batches == [[2, 0, 1, 3], []]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(0, 1.0, [1], {})], r"group 0 has 1 samples in its micro-batch, of rewards \[1.0\]; this loss needs pref"),
        ([(0, 1.0, [1], {}), (0, 1.0, [1], {})], r"group 0 has 2 samples in its micro-batch, of rewards \[1.0\]"),
        ([(0, 1.0, [1], {}), (0, 0.0, [0], {})], "sample 1 of a preference pair has no token to train on"),
    ],
)
def test_what_is_no_pair_is_named(given, message):
    with pytest.raises(DataError, match=message):
        paired(shard_of(*given, micro_batches=[[*range(len(given))]]))


def test_a_score_is_the_state_behind_the_last_trained_token():
    shard = shard_of((0, 1.0, [1, 1, 0], {}), (0, 0.0, [0, 0], {}), micro_batches=[[0, 1]])
    first, second = scored(shard).samples
    assert first.tokens.tolist() == [0, 1, 2, 3, 0]  # its last token is never looked at
    assert (first.response_length, first.loss_mask.tolist(), first.trajectory_tokens) == (3, [0, 0, 1], 1)
    assert second.tokens.tolist() == shard.samples[1].tokens.tolist()
    assert score_row(shard.samples[0], np.array([0, 0, 7], np.float32)).tolist() == [0, 7, 0]
    assert score_row(shard.samples[1], None).tolist() == [0, 0]


def test_a_margin_is_that_of_the_chosen_one():
    shard = shard_of((0, 1.0, [1], {"margin": 0.5}), (0, 0.0, [1], {"margin": 9.0}), micro_batches=[[0, 1]])
    assert margins(shard.samples).tolist() == [0.5]
    assert margins(shard_of((0, 1.0, [1], {}), (0, 0.0, [1], {}), micro_batches=[[0, 1]]).samples).tolist() == [0.0]
