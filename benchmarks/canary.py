"""What it costs to compare log-probs of fixed tokens after every update of weights, as a share of a step.

Whole runs of `slime-launch train` with the quick start's model and parts on this machine, from a step of the quick
start's size to one of 16 times as many tokens: 16 prompts of 8 samples, with 6 response tokens and with 96. `share` is
`perf/weight_canary_time` over `perf/step_time`, of the second step, as the first also loads what is used later.
The tokens that are compared are always the same few, so the share falls as steps grow; the goal is for a step of a real
run, which has far more tokens than either.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean

from _quick_start import SEED, depth, prepare
from _records import Record
from quickstart import BIN, ENGINE_PYTHON, MODEL_ARGS, ROOT
from quickstart_parts import Places, command_script, replace_flags, train_flags

SHARE_GOAL = 1.0
PROMPTS, GROUP, MICRO = 16, 8, 32
FUNCTIONS = ROOT / "benchmarks" / "_whole_length.py"
LENGTHS, QUICK_LENGTHS = (6, 96), (6,)
STEPS = 2
LIMIT_SECONDS = 1800.0
DROPPED = ("--eval-prompt-data", "--eval-interval", "--eval-temperature", "--save", "--save-interval")


def main(out: Path, *, quick: bool) -> list[Record]:
    """Run both lengths.

    Args:
        out: Directory for logs and results.
        quick: An eighth of the short responses alone, of the model's first layers.

    Raises:
        RuntimeError: A run failed.
    """
    places = prepare(few_layers=quick)
    records = []
    for length in QUICK_LENGTHS if quick else LENGTHS:
        prompts = PROMPTS // 8 if quick else PROMPTS
        rows = run(places, out / str(length), prompts, length)[1:]
        case = f"{prompts * GROUP} responses of {length} tokens"
        seconds, step = (fmean(row[f"perf/{name}_time"] for row in rows) for name in ("weight_canary", "step"))
        print(f"{case}: {seconds:.2f} s of {step:.1f} s", flush=True)
        goal = SHARE_GOAL if length == LENGTHS[-1] else None
        records += [
            Record(case, "share", 100 * seconds / step, "%", more_is_better=False, goal=goal),
            Record(case, "time", seconds, "s", more_is_better=False),
        ]
    return records


def run(places: Places, out: Path, prompts: int, length: int) -> list[dict[str, float]]:
    """A run to its end: the rows of its rollouts in metrics.jsonl."""
    out.mkdir(parents=True)
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=STEPS, bf16=False)
    for name in DROPPED:
        flags.pop(name, None)
    words = ["--output-dir", str(out / "run"), "--rollout-max-response-len", str(length)]
    samples = prompts * GROUP
    words += ["--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(GROUP)]
    words += ["--global-batch-size", str(samples), "--micro-batch-size", str(min(MICRO, samples))]
    words += ["--custom-generate-function-path", str(FUNCTIONS), "--custom-rm-path", f"{FUNCTIONS}:reward"]
    script = out / "command.sh"
    flags = replace_flags(flags, [*words, *depth(places)])
    text = command_script(flags, model_args=MODEL_ARGS, launcher=BIN / "slime-launch", root=ROOT)
    script.write_text(text)
    with (out / "log.txt").open("wb") as log:
        done = subprocess.run(
            ["bash", str(script)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            timeout=LIMIT_SECONDS,
        )
    if done.returncode:
        tail = "\n".join((out / "log.txt").read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"a run ended with exit code {done.returncode}:\n{tail}")
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "rollout"]
