"""The first sampled token after a command, today and on commit 17a70ff, alternating: a run, a resume, an evaluation.

The other commit is cloned from this repository and gets environments of its own; the model and the data are the quick
start's. Phases are those of the benchmark `launcher`. `engine` is a second engine, from its start until it is ready.
`share` is today's time over the other's in the same round. All are medians of the rounds. The first
round has cold caches and is not counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import launcher
from _quick_start import SEED, prepare
from _records import Record
from quickstart import MODEL_ARGS, ROOT
from quickstart_parts import Places, command_script, replace_flags, train_flags

BEFORE = "17a70ff3"
GOAL = 0.42
ENGINE = """
import contextlib, sys, time
from pathlib import Path
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec, SGLangEngine
try:
    from slime_rollout.engine.template import imported_sglang
except ImportError:
    imported_sglang = lambda config, spec: contextlib.nullcontext(config)
model, python, log = sys.argv[1:]
spec = EngineSpec(model_path=model)
with imported_sglang(EngineConfig(sglang_python=python), spec) as config, contextlib.ExitStack() as stack:
    for number in range(2):
        start = time.perf_counter()
        engine = stack.enter_context(SGLangEngine.start(config, spec, log_path=Path(f"{log}-{number}")))
        engine.wait_until_ready()
    print(time.perf_counter() - start)
"""
Measure = Callable[[Path, Path], dict[str, float]]
"""What gives the seconds of each phase of a checkout (first argument), working in a new directory (second)."""


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all of it.

    Args:
        out: Directory for logs and results. The other checkout lies next to it, for the next time.
        quick: One round of the run alone, which counts, instead of three of everything that do.
    """
    places = prepare()
    checkouts = {"before": checkout(out.with_name(f"start-{BEFORE}")), "now": ROOT}
    cases: dict[str, Measure] = {"run": started(places)}
    if not quick:
        cases |= {"resume": resumed(places), "evaluation": evaluated(places), "engine": second_engine(places)}
    records = []
    for case, measure in cases.items():
        rounds = []
        for number in range(1 if quick else 4):
            found = {side: measure(root, out / f"{case}-{number}-{side}") for side, root in checkouts.items()}
            print(f"{case}, round {number}: {summary(found)}", flush=True)
            rounds.append(found)
        records += records_of(case, rounds if quick else rounds[1:])
    return records


def checkout(directory: Path) -> Path:
    """A clone of the other commit, with its environments."""
    clone(directory, BEFORE)
    make = "source scripts/environments.sh && use_tools && sync_trainer && sync_engine"
    subprocess.run(["bash", "-c", make], cwd=directory, check=True)
    return directory


def clone(directory: Path, commit: str) -> None:
    """Another commit's files."""
    if not directory.exists():  # one without a repository of its own would have git check out this one
        new = directory.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", "--shared", str(ROOT), str(new)], check=True)
        new.rename(directory)
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=directory, check=True)


def summary(found: dict[str, dict[str, float]]) -> str:
    """A round in one line."""
    return ", ".join(f"{side} {sum(phases.values()):.1f} s" for side, phases in found.items())


def records_of(case: str, rounds: Sequence[dict[str, dict[str, float]]]) -> list[Record]:
    """Medians of the rounds: each phase before and now, both sums, and the share."""
    records = []
    for side in ("before", "now"):
        for phase in rounds[0][side]:
            value = median(found[side][phase] for found in rounds)
            records.append(Record(f"{case}, {side}", phase, value, "s", None if side == "before" else False))
        whole = median(sum(found[side].values()) for found in rounds)
        records.append(Record(f"{case}, {side}", "all", whole, "s", None if side == "before" else False))
    share = median(sum(found["now"].values()) / sum(found["before"].values()) for found in rounds)
    return [*records, Record(case, "share", share, "of before", False, GOAL)]


def started(places: Places) -> Measure:
    """A run of one step."""
    return lambda root, out: launcher.run(script(places, root, out, "train", ["--num-rollout", "1"]), out)


def evaluated(places: Places) -> Measure:
    """An evaluation alone."""

    def measure(root: Path, out: Path) -> dict[str, float]:
        return launcher.run(script(places, root, out, "eval", held_out(places)), out)

    return measure


def resumed(places: Places) -> Measure:
    """A run of two steps that ended after the first."""

    def measure(root: Path, out: Path) -> dict[str, float]:
        save = ["--save", str(out / "checkpoints"), "--save-interval", "1"]
        first = script(places, root, out / "first", "train", [*save, "--num-rollout", "1"])
        try:
            subprocess.run(["bash", str(first)], check=True, stdout=subprocess.DEVNULL)
            return launcher.run(script(places, root, out, "train", [*save, "--num-rollout", "2"]), out)
        finally:
            shutil.rmtree(out / "checkpoints", ignore_errors=True)  # of 4 GB

    return measure


def second_engine(places: Places) -> Measure:
    """An engine next to one that is up, as one that replaces another."""

    def measure(root: Path, out: Path) -> dict[str, float]:
        out.mkdir()
        words = [str(root / ".venv/bin/python"), "-c", ENGINE, str(places.hf), str(root / ".venv-engine/bin/python")]
        done = subprocess.run([*words, str(out / "engine.log")], check=True, capture_output=True, text=True, cwd=root)
        return {"until it is ready": float(done.stdout.split()[-1])}

    return measure


def held_out(places: Places) -> list[str]:
    """Flags of the held-out problems."""
    return ["--eval-prompt-data", "heldout", str(places.held_out_data), "--eval-temperature", "0"]


def script(places: Places, root: Path, out: Path, command: str, flags: Sequence[str]) -> Path:
    """A checkout's command as a shell script: the quick start's, without evaluation and checkpoints, and ``flags``."""
    out.mkdir(parents=True, exist_ok=True)  # a resumed run's holds its first start
    usual = train_flags(places, engine_python=root / ".venv-engine/bin/python", seed=SEED, steps=1)
    for name in ("--save", "--save-interval", "--eval-prompt-data", "--eval-interval", "--eval-temperature"):
        del usual[name]
    usual = replace_flags(usual, [*flags, "--output-dir", str(out / "run")])
    program = root / ".venv/bin/slime-launch"
    text = command_script(usual, model_args=MODEL_ARGS, launcher=program, root=root)
    path = out / "command.sh"
    path.write_text(text.replace(f"{os.fspath(program)} train", f"{os.fspath(program)} {command}"))
    return path
