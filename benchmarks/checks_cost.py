"""What it costs to keep strangers out: today against commit 872c92d4, which has none of these checks, in turns.

Both sides run in the same environments, each with its own sources. `start` is a run's way to its first token and
`update` the median of its updates of the engine's weights, with the first layers of the quick start's model. `load` is
a trainer's rank of a new process, from its imports to its loaded checkpoint. `share` is today's time over the other's
in the same pair. All are medians of the pairs, and the first pair, which has cold caches, is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import launcher
from _quick_start import SEED, depth, prepare
from _records import Record
from quickstart import BIN, ENGINE_PYTHON, MODEL_ARGS, ROOT
from quickstart_parts import Places, command_script, replace_flags, train_flags
from start import clone

BEFORE = "872c92d4"
PAIRS = 10
GOAL = 1.05
HIDDEN = "512"
SAVE = """
import sys, time
sys.path.insert(0, sys.argv[1])
begun = time.perf_counter()
import checkpoint
checkpoint.save(sys.argv[2], int(sys.argv[3]))
print(time.perf_counter() - begun)
"""
LOAD = SAVE.replace(
    "checkpoint.save(sys.argv[2], int(sys.argv[3]))",
    "checkpoint.worker(sys.argv[2], int(sys.argv[3]), sys.argv[2]).close()",
)
LITTLE_WORK: tuple[str, ...] = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4")
LITTLE_WORK += ("--micro-batch-size", "4", "--num-rollout", "5")


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all of it.

    Args:
        out: Directory for logs and results. The other commit's files lie next to it, for the next time.
        quick: One pair, which counts, instead of ten that do.
    """
    places = prepare(few_layers=True)
    before = out.with_name(f"checks-{BEFORE}")
    clone(before, BEFORE)
    roots = {"before": before, "now": ROOT}
    for side, root in roots.items():
        _load(root, "save", out / f"checkpoint-{side}")
    pairs = []
    for number in range(1 if quick else PAIRS + 1):
        order = list(roots) if number % 2 == 0 else list(reversed(roots))
        pairs.append({side: measured(places, roots[side], out, f"{number}-{side}") for side in order})
        print(f"pair {number}: {json.dumps(pairs[-1])}", flush=True)
    return records_of(pairs if quick else pairs[1:])


def measured(places: Places, root: Path, out: Path, name: str) -> dict[str, float]:
    """Seconds of one side's start, update and load."""
    start = launcher.run(script(places, root, out / name), out / name)
    rows = [json.loads(line) for line in (out / name / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [row["perf/update_weights_time"] for row in rows if "perf/update_weights_time" in row]
    loaded = _load(root, "load", out / f"checkpoint-{name.partition('-')[2]}")
    return {"start": sum(start.values()), "update": median(updates), "load": loaded}


def records_of(pairs: list[dict[str, dict[str, float]]]) -> list[Record]:
    """Medians of the pairs, and of their shares."""
    records = []
    for what in pairs[0]["now"]:
        for side in ("before", "now"):
            better = None if side == "before" else False
            records.append(Record(f"{what}, {side}", "time", median(pair[side][what] for pair in pairs), "s", better))
        share = median(pair["now"][what] / pair["before"][what] for pair in pairs)
        records.append(Record(what, "share", share, "of before", False, GOAL))
    return records


def script(places: Places, root: Path, out: Path) -> Path:
    """A run with a checkout's sources, as a shell script."""
    out.mkdir(parents=True)
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=1)
    for name in ("--save", "--save-interval", "--eval-prompt-data", "--eval-interval", "--eval-temperature"):
        del flags[name]
    flags = replace_flags(flags, [*LITTLE_WORK, *depth(places), "--output-dir", str(out / "run")])
    text = command_script(flags, model_args=MODEL_ARGS, launcher=BIN / "slime-launch", root=ROOT)
    path = out / "command.sh"
    path.write_text(text.replace("exec ", f"export PYTHONPATH={_sources(root)}\nexec ", 1))
    return path


def _load(root: Path, what: str, directory: Path) -> float:
    """Seconds of a new process of a checkout that saves a checkpoint, or loads it, with its benchmark's own model."""
    if what == "save":
        shutil.rmtree(directory, ignore_errors=True)
    program = LOAD if what == "load" else SAVE
    words = [sys.executable, "-c", program, str(root / "benchmarks"), str(directory), HIDDEN]
    environment = os.environ | {"PYTHONPATH": _sources(root)}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def _sources(root: Path) -> str:
    return os.pathsep.join(str(path) for path in sorted((root / "packages").glob("*/src")))
