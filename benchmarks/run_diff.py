"""`slime-launch diff` of two runs of 1,000 steps of 512 samples: equal ones, and ones that part in their last weight.

The runs' files are made up, with what a run on 16 ranks writes: 40 metrics and the spans of each step, checksums of 20
fields of each sample and of 400 weights. Seconds are wall time of the whole command, start of the interpreter included;
`start` is the same of `slime-launch --help`. `size` is that of the checksums alone, which every run writes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _records import Record

from report import rows
from slime_core.types import TrainReport
from slime_launch.step_sums import SumLog
from slime_rollout.ready import ReadyRollout

STEPS, QUICK_STEPS, SAMPLES, RANKS = 1000, 100, 512, 16
FIELDS, WEIGHTS, LANES = 20, 400, 3
SECONDS_GOAL = 5.0
LIMIT_SECONDS = 120.0


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both.

    Args:
        out: Where the runs' files go.
        quick: A tenth of the steps.
    """
    steps = QUICK_STEPS if quick else STEPS
    first, equal, other = (
        make_run(out / name, steps, flip=flip) for name, flip in (("a", False), ("b", False), ("c", True))
    )
    case = f"{steps:,} steps of {SAMPLES} samples"
    size = (first / "sums.jsonl").stat().st_size / 2**20
    return [
        Record("slime-launch", "start", seconds_of(["--help"], 0, "usage"), "s", more_is_better=False),
        Record(case, "equal", seconds_of(["diff", first, equal], 0, "equal:"), "s", False, SECONDS_GOAL),
        Record(case, "part", seconds_of(["diff", first, other], 1, "1 of 400 weights"), "s", False, SECONDS_GOAL),
        Record(case, "size", size, "MiB", more_is_better=False),
    ]


def seconds_of(words: list[str | Path], code: int, printed: str) -> float:
    """Wall time of a command, the least of three, which must end with this exit code and print this."""
    least = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "slime_launch.cli", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        least = min(least, time.perf_counter() - start)
        if done.returncode != code or printed not in done.stdout:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return least


def make_run(directory: Path, steps: int, *, flip: bool) -> Path:
    """The files of a run; with ``flip`` a bit of its last weight is another."""
    directory.mkdir(parents=True)
    dice, numbers = random.Random(7), np.random.default_rng(7)
    entries = {f"setting_{number}": {"value": number, "origin": "default"} for number in range(400)}
    (directory / "settings.json").write_text(json.dumps({"settings": entries, "packages": {}, "environment": {}}))
    log, names = SumLog(directory, None), [f"decoder.layers.{number}.weight" for number in range(WEIGHTS)]
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.writelines(json.dumps(row) + "\n" for row in rows(step, dice))
            sums = {
                f"field_{number}": numbers.integers(2**32, size=SAMPLES, dtype=np.uint32) for number in range(FIELDS)
            }
            weights = numbers.integers(2**32, size=(WEIGHTS, LANES), dtype=np.uint32)
            if flip and step == steps - 1:
                weights[-1, 0] ^= 1
            ready = ReadyRollout(
                rollout_id=step,
                weight_version=step,
                metrics={},
                seconds={},
                num_samples=SAMPLES,
                failures=[],
                examples=[],
                shards=[],
                sample_sums=sums | {"index": np.arange(SAMPLES) + step * SAMPLES},
                shard_sums=[int(one) for one in numbers.integers(2**32, size=RANKS)],
            )
            log.log(ready, TrainReport(rollout_id=step, steps=[], weight_names=names, weight_sums=weights))
    log.close()
    return directory
