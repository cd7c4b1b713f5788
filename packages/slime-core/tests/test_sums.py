import numpy as np

from slime_core.sums import sample_sums, shard_sum
from slime_core.types import TrainShard, TrainStep
from slime_core.types.arrays import Ragged


def test_numbers_of_any_width_have_the_sums_of_the_numbers():
    wide, narrow = (Ragged.of([np.array([1, 2], kind), None, np.zeros(0, kind)]) for kind in (np.int64, np.int32))
    found = sample_sums({"tokens": wide, "index": np.arange(3)})
    assert found["tokens"].tolist() == sample_sums({"tokens": narrow})["tokens"].tolist()
    assert len({*found["tokens"].tolist()}) == 3  # no row is not an empty one
    assert len({*found["index"].tolist()}) == 3


def test_the_sum_of_a_shard_depends_on_the_order_in_micro_batches():
    def shard(*micro_batches):
        step = TrainStep(micro_batches=list(micro_batches), global_trajectories=2, global_tokens=4)
        return TrainShard(rollout_id=0, temperature=1.0, columns={"index": np.array([3, 5])}, steps=[step])

    assert shard_sum(shard([0], [1])) == shard_sum(shard([0], [1]))
    assert len({shard_sum(shard([0], [1])), shard_sum(shard([1], [0])), shard_sum(shard([0, 1]))}) == 3
