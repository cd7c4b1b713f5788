"""`slime-launch report` for a long run: seconds and size for 1,000 steps of 512 samples, and how both grow tenfold.

The run's files are made up, with what a run on 16 ranks writes: about 40 metrics of each step, the spans of the loop
and of the ranks, and the first 8 samples of each rollout with 300 tokens each. Seconds are wall time of the whole
command, start of the interpreter included.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _records import Record

STEPS, QUICK_STEPS, FACTOR = 1000, 100, 10
SHOWN, TOKENS, RANKS = 8, 300, 16
STEP_SECONDS = 60.0
SECONDS_GOAL, MIB_GOAL = 5.0, 10.0
WORDS = ("the", "sum", "of", "two", "numbers", "is", "carry", "one", "so", "we", "get", "therefore", "check", "again")


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both lengths.

    Args:
        out: Where the runs' files go.
        quick: A tenth of the steps.
    """
    steps = QUICK_STEPS if quick else STEPS
    figures = {}
    for count in (steps, FACTOR * steps):
        directory = make_run(out / str(count), count)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "slime_launch.cli", "report", str(directory)], check=True)
        size = (directory / "report.html").stat().st_size / 2**20
        figures[count] = (time.perf_counter() - start, size)
    (seconds, size), (longer, larger) = figures.values()
    case = f"{steps:,} steps"
    return [
        Record(case, "time", seconds, "s", False, SECONDS_GOAL),
        Record(case, "size", size, "MiB", False, MIB_GOAL),
        Record(f"{FACTOR} times as long", "time", longer / seconds, "times", False, float(FACTOR)),
        Record(f"{FACTOR} times as long", "size", larger / size, "times", False, float(FACTOR)),
    ]


def make_run(directory: Path, steps: int) -> Path:
    """The files of a run of so many steps."""
    (directory / "samples").mkdir(parents=True)
    dice = random.Random(7)
    settings = {f"setting_{number}": {"value": number, "origin": "default"} for number in range(400)}
    settings["num_rollout"] = {"value": steps, "origin": "command line"}
    (directory / "settings.json").write_text(json.dumps({"settings": settings}))
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.writelines(json.dumps(row) + "\n" for row in rows(step, dice))
            write_samples(directory / "samples", step, dice)
    return directory


def rows(step: int, dice: random.Random) -> Iterator[dict[str, Any]]:
    """The lines of a step in `metrics.jsonl`."""
    now = 1.7e9 + STEP_SECONDS * step
    head = {"step": step, "rollout_id": step, "time": now + STEP_SECONDS}
    train = (
        "loss",
        "pg_loss",
        "kl_loss",
        "grad_norm",
        "lr",
        "ppo_kl",
        "entropy_loss",
        "train_rollout_logprob_abs_diff",
    )
    yield {"kind": "train", **head, **{f"train/{name}": dice.gauss(0.1, 0.02) for name in train}}
    rollout = {f"rollout/number_{number}": dice.gauss(1, 0.1) for number in range(28)}
    reward = {
        "rollout/raw_reward": dice.random(),
        "perf/step_time": STEP_SECONDS,
        "perf/wait_time_ratio": dice.random(),
    }
    yield {"kind": "rollout", **head, **rollout, **reward}
    loop = [("generate", now, 35), ("train", now + 35, 20), ("send", now + 55, 3)]
    ranks = [("ref_log_probs", now + 35, 5), ("forward_backward", now + 40, 14), ("optimizer", now + 54, 1)]
    yield {"kind": "timeline", **head, "spans": {"loop": loop, **{f"rank {rank}": ranks for rank in range(RANKS)}}}
    if step % 20 == 0:
        yield {"kind": "eval", **head, "eval/aime": dice.random(), "eval/aime/stderr": 0.02}


def write_samples(directory: Path, rollout: int, dice: random.Random) -> None:
    """The samples that a rollout keeps, and what a rank computed for them."""
    kept, computed = [], {}
    for number in range(SHOWN):
        log_probs = [round(-dice.expovariate(3), 4) for _ in range(TOKENS)]
        texts = [" " + dice.choice(WORDS) for _ in range(TOKENS)]
        index = 512 * rollout + number
        sample: dict[str, Any] = {"rollout": rollout, "weight_version": rollout, "index": index, "group": index // 8}
        sample |= {"trajectory": index, "prompt": " ".join(dice.choices(WORDS, k=60)), "label": "42", "dropped": None}
        sample |= {"reward": float(dice.random() < 0.5), "rewards": None, "status": "completed", "failure": None}
        sample |= {"length": TOKENS, "cut": None, "tokens": texts, "mask": None, "versions": [rollout] * TOKENS}
        kept.append(sample | {"log_probs": log_probs, "metadata": {}})
        computed[index] = {
            "train_log_probs": [round(value + dice.gauss(0, 0.01), 4) for value in log_probs],
            "advantages": [dice.choice((-1.0, 1.0))] * TOKENS,
        }
    for suffix, value in (("", kept), ("-rank_0", computed)):
        path = directory / f"rollout_{rollout:07d}{suffix}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(value).encode(), compresslevel=3))
