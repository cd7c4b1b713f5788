"""What the launcher takes: `--help`, `plan`, the quick start's way to its first token, its share of a step.

`--help` and `plan` are wall times of a whole process. The way to the first token goes from the start of the command to
the engine's second batch of prompts, which comes after the first one's tokens. Engine, router and trainers start side
by side once Ray is there; the engine's part is in three phases by its own log, and the rest of the wait, for router and
trainers, is the fourth. A launcher's share of a step is what is
neither generating, scoring, nor a trainer's own work, nor sending: from the end of one step to the end of the next.
All are medians, of processes, of runs, and of steps but each run's first.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from _quick_start import SEED, prepare
from _records import Record
from quickstart import BIN, ENGINE_PYTHON, MODEL_ARGS, ROOT
from quickstart_parts import Places, command_script, replace_flags, train_flags

HELP_GOAL, PLAN_GOAL, TOKEN_GOAL, SHARE_GOAL = 0.3, 3.0, 20.0, 3.0
START_LIMIT_SECONDS = 300.0
LAUNCHER = BIN / "slime-launch"
WORK = ("generate", "reward", "ref_log_probs", "log_probs", "forward_backward", "optimizer", "update_weights")
"""Phases of a step that are not overhead: the halves' own times, and what the loop waits for weights."""
CHECKS, PLACED, UP, SENT, TOKEN = "checks", "Ray", "router and trainers, after the engine", "weights", "first token"
IMPORTED, LOADED, SERVES = "engine's imports", "engine's weights", "engine's cache and server"
PHASES = (CHECKS, PLACED, IMPORTED, LOADED, SERVES, UP, SENT, TOKEN)


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all of it.

    Args:
        out: Directory for logs and results.
        quick: Two processes and one run of two steps, instead of five and three runs of six.
    """
    processes, runs, steps = (2, 1, 2) if quick else (5, 3, 6)
    places = prepare()
    words = [str(LAUNCHER), "train", "--help"]
    records = [Record("--help", "time", median(seconds(words) for _ in range(processes)), "s", False, HELP_GOAL)]
    plan = ["bash", str(script(places, out / "plan", steps, command="plan"))]
    records.append(Record("plan", "time", median(seconds(plan) for _ in range(processes)), "s", False, PLAN_GOAL))
    starts, shares = [], []
    for number in range(runs):
        print(f"run {number + 1} of {runs}", flush=True)
        starts.append(run(script(places, out / f"run-{number}", steps), out / f"run-{number}"))
        shares += overheads(out / f"run-{number}" / "run" / "metrics.jsonl")
    records += [Record("start", phase, median(start[phase] for start in starts), "s", False) for phase in PHASES]
    whole = median(sum(start.values()) for start in starts)
    records.append(Record("start", "to the first token", whole, "s", False, TOKEN_GOAL))
    records.append(Record("step", "overhead", median(seconds for seconds, _ in shares), "s", False))
    share = 100 * median(seconds / step for seconds, step in shares)
    return [*records, Record("step", "overhead's share", share, "%", False, SHARE_GOAL)]


def script(places: Places, out: Path, steps: int, *, command: str = "train") -> Path:
    """The quick start's command without evaluation and checkpoints, as a shell script."""
    out.mkdir(parents=True)
    flags = train_flags(places, engine_python=ENGINE_PYTHON, seed=SEED, steps=steps)
    for name in ("--save", "--save-interval", "--eval-prompt-data", "--eval-interval", "--eval-temperature"):
        del flags[name]
    flags = replace_flags(flags, ["--output-dir", str(out / "run")])
    text = command_script(flags, model_args=MODEL_ARGS, launcher=LAUNCHER, root=ROOT)
    launcher = shlex.quote(str(LAUNCHER))
    path = out / "command.sh"
    path.write_text(text.replace(f"exec {launcher} train", f"exec {launcher} {command}"))
    return path


def seconds(words: Sequence[str]) -> float:
    """Wall time of a process."""
    start = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def run(command: Path, out: Path) -> dict[str, float]:
    """A run to its end: seconds of each phase of its start.

    Raises:
        RuntimeError: It failed, or did not come up in time; says where the log is.
    """
    log, engine = out / "log.txt", out / "run" / "logs" / "engine_0.log"
    reached = {
        CHECKS: (log, "\n", 1),
        PLACED: (log, "placement:", 1),
        IMPORTED: (engine, "Init parallel begin", 1),
        LOADED: (engine, "Load weight end", 1),
        SERVES: (engine, "The server is fired up", 1),
        UP: (log, " are up (", 1),
        SENT: (engine, "[continue_generation]", 1),
        TOKEN: (engine, "Prefill batch", 2),
    }
    found: dict[str, float] = {}
    with log.open("w") as stdout:
        start = last = time.perf_counter()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(["bash", str(command)], stdout=stdout, stderr=subprocess.STDOUT, env=environment)
        try:
            for phase, (path, text, count) in reached.items():
                while not path.exists() or path.read_text(errors="replace").count(text) < count:
                    if process.poll() is not None or time.perf_counter() - start > START_LIMIT_SECONDS:
                        raise RuntimeError(f"the run never came to {phase!r}; see {log}")
                    time.sleep(0.01)
                now = time.perf_counter()
                found[phase], last = now - last, now
            if process.wait(START_LIMIT_SECONDS):
                raise RuntimeError(f"the run failed; see {log}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return found


def overheads(metrics: Path) -> list[tuple[float, float]]:
    """Of each step but the first: seconds that are overhead, and of the whole step."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    return [overhead(before, row) for before, row in pairwise(rollouts)]


def overhead(before: Mapping[str, float], row: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of overhead, and of the whole step, from the row before it and its own."""
    whole = row["time"] - before["time"]
    return whole - sum(row.get(f"perf/{phase}_time", 0.0) for phase in WORK), whole
