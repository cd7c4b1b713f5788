"""A real trainer rank that takes one step; prints the most memory that it had. For plan/test_measured.py.

python measured_rank.py '{"model": {…}, "flags": {…}, "rank": 0, "world": 1, "port": 1234, "samples": 4, …}'
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous, TrainSample, TrainShard, TrainStep
from slime_megatron.service import MegatronConfig, start_worker


def main():
    given = json.loads(sys.argv[1])
    shape = ModelShape.from_hf_config(given["model"])
    where = Rendezvous(rank=given["rank"], world_size=given["world"], address="127.0.0.1", port=given["port"])
    algorithm = AlgorithmConfig(**given["algorithm"])
    worker = start_worker(MegatronConfig(**given["flags"], trainer_threads=1), algorithm, shape, where)
    count, length, micro = given["samples"], given["length"], given["micro"]
    numbers = np.random.default_rng(0)
    samples = [
        TrainSample(
            index=index,
            group_index=index // 2,
            tokens=numbers.integers(0, shape.vocab_size, length).astype(np.int32),
            response_length=length // 2,
            loss_mask=np.ones(length // 2, np.uint8),
            trajectory_tokens=length // 2,
            reward=1.0 - 2 * (index % 2),
            raw_reward=float(index % 2),
        )
        for index in range(count)
    ]
    batches = [list(range(start, min(start + micro, count))) for start in range(0, count, micro)]
    everywhere = count * given["replicas"]
    step = TrainStep(micro_batches=batches, global_trajectories=everywhere, global_tokens=everywhere * (length // 2))
    worker.train(TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step]))
    lines = Path("/proc/self/status").read_text().splitlines()
    print("PEAK", next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
