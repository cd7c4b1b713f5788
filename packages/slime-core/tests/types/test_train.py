import numpy as np
import pytest

from slime_core.errors import DamagedError
from slime_core.types import TrainSample, TrainShard, TrainStep

SAMPLES = [
    TrainSample(
        index=index, group_index=0, tokens=np.arange(5, dtype=np.int32), response_length=2,
        loss_mask=np.ones(2, np.uint8), trajectory_tokens=2, reward=0.1 * index, raw_reward=1.0,
        rollout_log_probs=np.full(2, -0.1, np.float32), extras={"advantages": np.full(2, index, np.float32)},
    )
    for index in range(3)
]  # fmt: skip
STEPS = [TrainStep(micro_batches=[[0, 2], [1]], global_trajectories=3, global_tokens=6)]


def test_a_shard_on_disk(tmp_path):
    shard = TrainShard.of(rollout_id=3, temperature=0.7, samples=SAMPLES, steps=STEPS)
    shard.write(tmp_path / "shard.npz")
    read = TrainShard.read(str(tmp_path / "shard.npz"))
    assert (read.rollout_id, read.temperature, read.steps) == (3, 0.7, STEPS)
    for one, other in zip(read.samples, SAMPLES, strict=True):
        assert (one.index, one.reward, one.teacher_log_probs) == (other.index, other.reward, None)
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
        np.testing.assert_array_equal(one.extras["advantages"], other.extras["advantages"], strict=True)


def test_what_is_not_a_shard_is_refused(tmp_path):
    (tmp_path / "shard.npz").write_bytes(b"PK")
    with pytest.raises(DamagedError, match="a file of train data is cut off, altered or something else"):
        TrainShard.read(tmp_path / "shard.npz")
