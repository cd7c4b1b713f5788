"""A trainer that takes a step under each of several commands; prints a line of JSON for each. For test_features_run.py.

python step_program.py FILE    FILE has the words of each command by its name, and is beside what they name
"""

import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from slime_convert.shape import ModelShape
from slime_core.types import Rendezvous, RolloutBatch, RolloutColumns, Sample, Status
from slime_launch.batch_spec import batch_spec
from slime_launch.flags import parse_train
from slime_megatron.service import start_worker
from slime_rollout.prepare import split_rollout

PROMPT, RESPONSE, GROUPS = 4, 6, 4
SIZES = {None: 2, "conversations": 1, "pairs": 2}


def record(rows, vocab_size):
    """A recorded rollout: scored samples, conversations or preference pairs."""
    numbers, size, samples = np.random.default_rng(0), SIZES[rows], []
    likely = -math.log(vocab_size)  # of each token, nearly, as the weights are random
    known = {} if rows else {"log_probs": [likely] * RESPONSE, "weight_version": 0}
    for index in range(GROUPS * size):
        if index % size == 0:
            prompt = numbers.integers(0, vocab_size, PROMPT).tolist()
        reward = 0.0 if rows == "conversations" else float(index % 2 == 0)
        sample = Sample(index=index, group_index=index // size, prompt="p", tokens=[*prompt], reward=reward)
        sample.append_response(numbers.integers(0, vocab_size, RESPONSE).tolist(), text="r", **known)
        sample.status = Status.COMPLETED
        samples.append(sample)
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    path = Path(f"{rows}.npz")
    RolloutBatch(rollout_id=0, groups=groups).columns().write(path)
    return path


def step(words, shape, recorded):
    """The metrics of the steps that a worker of the command takes."""
    settings = parse_train(words)
    [shard] = split_rollout(RolloutColumns.read(recorded[settings.kind.rows]), batch_spec(settings, shape, 1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    where = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=port)
    try:
        return start_worker(settings.megatron, settings.algorithm, shape, where).train(shard).steps
    finally:
        if dist.is_initialized():
            from slime_megatron.ranks.parallel import leave_ranks  # imports Megatron, which a worker prepares first

            leave_ranks()


def main():
    file = Path(sys.argv[1])
    given = json.loads(file.read_text())
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    shape = ModelShape.from_hf_config("hf")
    recorded = {rows: record(rows, shape.vocab_size) for rows in SIZES}
    for name, words in given.items():
        started = time.monotonic()
        try:
            answer = {"steps": step(words, shape, recorded)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, "seconds": time.monotonic() - started, **answer}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
