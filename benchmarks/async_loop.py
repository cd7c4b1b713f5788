"""Wall time of a step where generation and training overlap, against that of the longer of the two alone.

Whole runs of `slime-launch train` with the quick start's model and parts: 16 prompts of four samples a step, whose
lengths are drawn log-normally (half have less than 20 tokens, one in thirty the most, 128), and a reference model.
Both halves then take about as long. The engine computes on one core with one thread, and the trainer on another, so
that neither takes time from the other. One run is in step, the other generates up to two rollouts ahead. Both train on
samples of the same lengths, and on all of them, as rewards do not depend on the texts; the latter takes groups as they
are finished, short ones first, so its later steps have 3% more tokens.

`generate alone` and `train alone` are the phases of the run in step, where one waits while the other works. `sync` and
`async` are what a step takes from one record to the next, on average after the first two. `async / longer` is the
latter over the longer of the two alone; what it has above 1 is sending weights, while engines pause, and waiting.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from _quick_start import SEED, depth, prepare
from _records import Record
from quickstart import BIN, ENGINE_PYTHON, MODEL_ARGS, ROOT
from quickstart_parts import Places, command_script, replace_flags, train_flags

from slime_launch.derived import computes_bfloat16

GOAL = 1.1
PROMPTS, GROUP, LONGEST, SKIPPED = 16, 4, 128, 2
LIMIT_SECONDS = 900.0
FUNCTIONS = ROOT / "benchmarks" / "_long_tailed.py"
OF_QUICK_START = ("--colocate", "--no-offload-train", "--no-offload-rollout", "--save", "--save-interval")
EVALUATION = ("--eval-prompt-data", "--eval-interval", "--eval-temperature")


def main(out: Path, *, quick: bool) -> list[Record]:
    """Run both loops.

    Args:
        out: Directory for logs and results.
        quick: Three steps of an eighth of the prompts instead of twelve, a quarter as long at most, of the model's
            first layers.

    Raises:
        RuntimeError: There are not two cores, or a run failed.
    """
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise RuntimeError(f"async_loop needs two cores, one for each half, and may use {len(cores)}")
    steps, size = (3, sized(PROMPTS // 8, LONGEST // 4)) if quick else (12, sized(PROMPTS, LONGEST))
    places = prepare(few_layers=quick)
    rows = {}
    for name, further in (("sync", []), ("async", ["--async-buffer-size", "2"])):
        print(f"{name}: {steps} steps", flush=True)
        rows[name] = run(places, out / name, steps, [*size, *further], cores)
    return figures(rows["sync"], rows["async"])


def sized(prompts: int, longest: int, steps: int = 1) -> list[str]:
    """Flags of so many prompts a rollout, and so many tokens a response; a rollout is trained on in so many steps."""
    size = str(prompts * GROUP // steps)
    words = ["--rollout-batch-size", str(prompts), "--rollout-max-response-len", str(longest)]
    return [*words, "--global-batch-size", size, "--micro-batch-size", size]


def run(
    places: Places, out: Path, steps: int, further: Sequence[str], cores: Sequence[int]
) -> list[Mapping[str, float]]:
    """A run to its end: the rows of its rollouts in metrics.jsonl."""
    out.mkdir(parents=True)
    bf16 = computes_bfloat16()  # emulated it is many times as slow, which is not what is measured here
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=steps, bf16=bf16)
    for name in (*OF_QUICK_START, *EVALUATION):
        del flags[name]
    words = ["--output-dir", str(out / "run"), "--n-samples-per-prompt", str(GROUP)]
    words += ["--custom-generate-function-path", str(FUNCTIONS), "--custom-rm-path", f"{FUNCTIONS}:reward"]
    words += ["--engine-threads", "1", "--trainer-threads", "1"]
    # Which cores OpenMP's threads run on, the first of which is the process's own.
    words += ["--train-env-vars", json.dumps({"GOMP_CPU_AFFINITY": str(cores[1])})]
    script = out / "command.sh"
    flags = replace_flags(flags, [*words, *depth(places), *further])
    script.write_text(command_script(flags, model_args=MODEL_ARGS, launcher=BIN / "slime-launch", root=ROOT))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GOMP_CPU_AFFINITY": str(cores[0])}
    with (out / "log.txt").open("wb") as log:
        done = subprocess.run(
            ["bash", str(script)], stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=LIMIT_SECONDS
        )
    if done.returncode:
        tail = "\n".join((out / "log.txt").read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"a run ended with exit code {done.returncode}:\n{tail}")
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "rollout"]


def figures(sync: Sequence[Mapping[str, float]], overlapped: Sequence[Mapping[str, float]]) -> list[Record]:
    """Seconds a step of both runs, and what they are against the longer half."""
    counted = sync[SKIPPED:]
    generate, train, send = (
        fmean(row[f"perf/{phase}_time"] for row in counted) for phase in ("rollout", "train", "update_weights")
    )
    longer = max(generate, train)
    seconds = {
        "generate alone": generate,
        "train alone": train,
        "send weights": send,
        "sync": step_seconds(sync),
        "async": step_seconds(overlapped),
    }
    return [
        *(Record(name, "time", value, "s/step", more_is_better=False) for name, value in seconds.items()),
        Record("sync / longer", "time", seconds["sync"] / longer, "x", more_is_better=False),
        Record("async / longer", "time", seconds["async"] / longer, "x", more_is_better=False, goal=GOAL),
    ]


def step_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Mean seconds from the record of a step to the next one's, after the first ones."""
    return (rows[-1]["time"] - rows[SKIPPED - 1]["time"]) / (len(rows) - SKIPPED)
