"""Runs of the real trainer ranks on recorded rollouts: no engines."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from launching import Assets, rows, run, started, train_command, tree, wait_until_gone
from tiny import VOCAB_SIZE

from slime_core.types import RolloutBatch, Sample, TrainShard

TIMEOUT_MINUTES = 0.2
ENDED = 30.0  # from the moment of the trouble, the time that others wait in vain included
# A step's advantages on rank 3 of 4, where the others are in the pipeline's schedule already.
TROUBLE = """
import os, pathlib, signal, time
import torch
from slime_core.ops import estimator_named

def advantages(inputs):
    if torch.distributed.get_rank() == 3:
        pathlib.Path({moment!r}).write_text(repr(time.time()))
        {trouble}
    return estimator_named("grpo")(inputs)
"""
TROUBLES = {
    "raises": ("1 / 0", "slime-launch: trainer rank 3 failed with ZeroDivisionError: division by zero"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "slime-launch: trainer rank 3 died"),
    "hangs": (
        "time.sleep(10_000)",
        "slime-launch: trainer rank 3 did not end, and others have waited in vain: trainer rank ",
    ),
}


def record(work: Path, rollouts: int) -> str:
    """Write rollouts of 8 groups of 8 random samples; returns their template."""
    rng = random.Random(5)
    work.mkdir(parents=True, exist_ok=True)
    for number in range(rollouts):
        groups = []
        for group in range(8):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(4 + group)]
            responses = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 6))] for _ in range(8)]
            groups.append(
                [
                    Sample(
                        index=64 * number + 8 * group + place, group_index=group, prompt="p",
                        tokens=prompt + response, response_length=len(response), reward=float(place % 2),
                        rollout_log_probs=[-6.0] * len(response),
                    )
                    for place, response in enumerate(responses)
                ]
            )  # fmt: skip
        RolloutBatch(rollout_id=number, groups=groups).columns().write(work / f"{number}.npz")
    return f"{work}/{{rollout_id}}.npz"


def recorded_command(assets: Assets, work: Path, *extra: str, ranks: int, rollouts: int) -> list[str]:
    """A run on recorded rollouts."""
    flags = ["--load-debug-rollout-data", record(work / "recorded", rollouts), "--debug-train-only"]
    flags += ["--actor-num-gpus-per-node", str(ranks)]
    return train_command(assets, work, *flags, *extra, rollouts=rollouts, save=False)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_training_alone_with_traces_and_train_data(qwen3: Assets, tmp_path: Path) -> None:
    extra = ["--pipeline-model-parallel-size", "2", "--profile", "--profile-step-start", "1", "--profile-step-end", "2"]
    extra += ["--profile-ranks", "0", "1", "--save-debug-train-data", f"{tmp_path}/data/{{rollout_id}}-{{rank}}.npz"]
    text = run(recorded_command(qwen3, tmp_path, *extra, ranks=2, rollouts=2), tmp_path / "train.txt")
    assert "2 for training (CPU worker processes, because there is no CUDA); no engines" in text
    logs = {path.name for path in (tmp_path / "out" / "logs").iterdir()}
    assert {"trainer-0.log", "trainer-1.log", "rollout.log"} <= logs
    assert not [name for name in logs if "engine" in name or "router" in name]
    assert [row["train/grad_norm"] > 0 for row in rows(tmp_path, "train")] == [True, True]
    for row in rows(tmp_path, "rollout"):
        assert row["perf/forward_backward_tok_per_s"] > 0 and row["perf/ref_log_probs_tflops"] > 0
        assert 1e8 < row["perf/peak_memory_bytes"] < 1e10 and row["perf/update_weights_bytes"] == 0
    traces = sorted((tmp_path / "out" / "profile").iterdir())
    assert [path.name for path in traces] == [f"rollout_0000001-rank_{rank}.json.gz" for rank in (0, 1)]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert "forward_backward" in {event.get("name") for event in events}
    for number in range(2):
        shards = [TrainShard.read(tmp_path / "data" / f"{number}-{rank}.npz") for rank in range(2)]
        assert [shard.rollout_id for shard in shards] == [number, number]
        for one, other in zip(*(shard.samples for shard in shards), strict=True):
            np.testing.assert_array_equal(one.extras["ref_log_probs"], other.extras["ref_log_probs"])


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", TROUBLES)
def test_a_rank_in_trouble_ends_the_step_and_is_named(qwen3: Assets, tmp_path: Path, case: str) -> None:
    trouble, message = TROUBLES[case]
    moment = tmp_path / "moment"
    (tmp_path / "mine.py").write_text(TROUBLE.format(moment=str(moment), trouble=trouble))
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"]
    extra = [*layout, "--custom-advantage-function-path", f"{tmp_path}/mine.py:advantages"]
    extra += ["--distributed-timeout-minutes", str(TIMEOUT_MINUTES)]
    log = tmp_path / "train.txt"
    with started(recorded_command(qwen3, tmp_path, *extra, ranks=4, rollouts=1), log) as process:
        while not moment.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        family = tree(process)
        code = process.wait(2 * ENDED)
        seconds = time.time() - float(moment.read_text())
        left = wait_until_gone(family, ENDED)
    text = log.read_text()
    said = next((line for line in text.splitlines() if line.startswith("slime-launch: ")), text)
    print(f"rank 3 {case}: the run ended after {seconds:.1f} s: {said}")
    assert code == 1 and not left
    assert said.startswith(message)
    assert seconds < ENDED
