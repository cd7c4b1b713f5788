"""How long `plan --simulate` takes: 1,000 steps on 512 GPUs, one way of the table, and a table.

Half of the GPUs generate, on engines of one GPU each; a rollout is 64 groups of eight responses, whose lengths are
log-normal up to 16,384 tokens. `turns` has no overlap, `ahead` generates two rollouts ahead, `bounded` does so with
`--max-weight-staleness 1`, where most groups are begun more than once, and `partial` cuts off a third of the groups.
`table` is all splits and buffers of a command on 64 GPUs, as `plan --simulate` tries them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from _records import Record

from slime_launch.flags import parse_train
from slime_launch.plan.profile import EngineSpeed, LoopSpeed, Points, Profile, TrainerSpeed
from slime_launch.plan.setup import Setup
from slime_launch.plan.simulate import simulate
from slime_launch.plan.splits import try_ways

GOAL_SECONDS = 10.0
STEPS, QUICK_STEPS = 1000, 20
MEDIAN, LONGEST = 2000, 16_384
SETUP = Setup(actor_gpus=256, engines=256, prompts=64, samples=8, steps=STEPS)
WAYS: dict[str, dict[str, Any]] = {
    "turns": {},
    "ahead": {"ahead": 2},
    "bounded": {"ahead": 2, "most_stale": 1},
    "partial": {"in_flight": 96, "partial": True},
}
COMMAND = (
    "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 500 --rollout-batch-size 64 --n-samples-per-prompt 8 "
    f"--rollout-max-response-len {LONGEST} --rollout-concurrency 2048 --actor-num-nodes 4 --actor-num-gpus-per-node 8 "
    "--rollout-num-gpus 32 --tensor-model-parallel-size 2"
)


def main(out: Path, *, quick: bool) -> list[Record]:
    """Simulate.

    Args:
        out: Not written to.
        quick: 20 steps instead of 1,000.
    """
    setup = dataclasses.replace(SETUP, steps=QUICK_STEPS if quick else STEPS)
    records = []
    for name, changes in WAYS.items():
        taken = seconds(functools.partial(simulate, PROFILE, dataclasses.replace(setup, **changes)))
        print(f"{name}: {taken:.2f} s", flush=True)
        records.append(Record(name, "512 GPUs, 1,000 steps", taken * STEPS / setup.steps, "s", False, GOAL_SECONDS))
    if not quick:
        taken = seconds(lambda: try_ways(PROFILE, parse_train(COMMAND.split()), gpus_per_node=8))
        records.append(Record("table", "64 GPUs", taken, "s", False))
    return records


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def lengths() -> Points:
    """Log-normal, cut at the longest."""
    parts = [number / 40 for number in range(41)]
    marks = (NormalDist().inv_cdf(min(max(part, 0.0005), 0.9999)) for part in parts)
    return tuple((part, min(MEDIAN * math.exp(mark), LONGEST)) for part, mark in zip(parts, marks, strict=True))


PROFILE = Profile(
    lengths=lengths(),
    prompt_tokens=200,
    engine=EngineSpeed(
        decode=((1, 60.0), (8, 420.0), (64, 2200.0), (256, 5000.0)), most_running=256, prefill_tokens_per_second=20_000
    ),
    trainer=TrainerSpeed(gpus=256, token_seconds=1e-5, fixed_seconds=1.0, send_seconds=5.0),
    loop=LoopSpeed(prepare_seconds=0.5, between_seconds=0.2),
)
