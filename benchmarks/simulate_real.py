"""Simulated steps against those of real runs: one profile, from three runs, and what it says of nine others.

Runs of `async_loop` in other settings: the quick start's model, groups of four samples whose lengths are log-normal and
do not depend on the texts, one engine and one trainer, a core each. The profile is that of two runs that take turns, of
2 and of 8 prompts a step, and of one that overlaps (`slime_launch.plan.of_run`): both halves share the memory bandwidth
of the machine. Then each setting is run, and simulated from that profile
and the run's own settings. `error` is the simulated step over the real one, less 1, without its sign; steps are the
mean of all but the first two. Nothing else should work on the machine meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _quick_start import prepare
from _records import Record
from async_loop import SKIPPED, run, sized, step_seconds

from slime_launch.plan.of_run import profile_of_runs
from slime_launch.plan.profile import Profile, write_profile
from slime_launch.plan.setup import setup_of
from slime_launch.plan.simulate import SimulatedRun, simulate

GOAL = 15.0
STEPS, QUICK_STEPS, SEEDS = 10, 3, 5
PROFILED: tuple[tuple[int, list[str]], ...] = ((2, []), (8, []), (8, ["--async-buffer-size", "2"]))
QUICK_PROFILED: tuple[tuple[int, list[str]], ...] = ((2, []), (4, ["--async-buffer-size", "2"]))
LONGEST = 64
AHEAD, OVER = "--async-buffer-size", "--over-sampling-batch-size"
SETTINGS: dict[str, tuple[int, list[str]]] = {
    "turns, 6 prompts": (6, []),
    "turns, 3 prompts": (3, []),
    "turns, two optimizer steps": (6, ["--num-steps-per-rollout", "2"]),
    "1 ahead, 6 prompts": (6, [AHEAD, "1"]),
    "2 ahead, 6 prompts": (6, [AHEAD, "2"]),
    "2 ahead, 4 prompts, at most 1 behind": (4, [AHEAD, "2", "--max-weight-staleness", "1"]),
    "4 ahead, weights every 2": (4, [AHEAD, "4", "--update-weights-interval", "2"]),
    "over-sampling, 4 of 6": (4, [OVER, "6"]),
    "partial rollouts, 4 of 6": (4, [OVER, "6", "--partial-rollout"]),
}


def main(out: Path, *, quick: bool) -> list[Record]:
    """Run those that the profile is made of, then the others.

    Args:
        out: Directory for logs, the profile and results.
        quick: Three steps each instead of ten, a quarter as long at most, of the model's first layers; two runs to
            profile, and the first setting alone.

    Raises:
        RuntimeError: There are not two cores, or a run failed.
    """
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise RuntimeError(f"simulate_real needs two cores, one for each half, and may use {len(cores)}")
    steps, longest = (QUICK_STEPS, LONGEST // 4) if quick else (STEPS, LONGEST)
    settings = dict(list(SETTINGS.items())[:1]) if quick else SETTINGS
    profiled = QUICK_PROFILED if quick else PROFILED
    places = prepare(few_layers=quick)
    for number, (prompts, further) in enumerate(profiled):
        print(f"to profile: {prompts} prompts {' '.join(further)}: {steps} steps", flush=True)
        run(places, out / f"profiled-{number}", steps, flags_of(prompts, longest, further), cores)
    profile = profile_of_runs([out / f"profiled-{number}" / "run" for number in range(len(profiled))])
    write_profile(profile, out / "profile.toml")
    records = []
    for number, (name, (prompts, further)) in enumerate(settings.items()):
        print(f"{name}: {steps} steps", flush=True)
        directory = out / f"run-{number}"
        rows = run(places, directory, steps, flags_of(prompts, longest, further), cores)
        records += compared(name, rows, foreseen(profile, directory / "run", steps))
    return records


def flags_of(prompts: int, longest: int, further: Sequence[str]) -> list[str]:
    """Flags of a setting."""
    steps = int(further[further.index("--num-steps-per-rollout") + 1]) if "--num-steps-per-rollout" in further else 1
    return [*sized(prompts, longest, steps), *further]


def foreseen(profile: Profile, output_dir: Path, steps: int) -> list[SimulatedRun]:
    """The run in a directory, simulated by its own settings, with several seeds."""
    entries: Mapping[str, Any] = json.loads((output_dir / "settings.json").read_text(encoding="utf-8"))["settings"]
    setup = setup_of({name: entry["value"] for name, entry in entries.items()}, steps=steps)
    return [simulate(profile, dataclasses.replace(setup, seed=seed)) for seed in range(SEEDS)]


def compared(name: str, rows: Sequence[Mapping[str, Any]], simulated: Sequence[SimulatedRun]) -> list[Record]:
    """Seconds of a step of the real run and of the simulated ones, by how much they differ, and both stalenesses."""
    real = step_seconds(rows)
    step = fmean((one.ends[-1] - one.ends[SKIPPED - 1]) / (len(one.ends) - SKIPPED) for one in simulated)
    stale = fmean(row.get("rollout/staleness/mean", 0.0) for row in rows)
    return [
        Record(name, "real", real, "s/step"),
        Record(name, "simulated", step, "s/step"),
        Record(name, "error", 100 * abs(step / real - 1), "%", more_is_better=False, goal=GOAL),
        Record(name, "real staleness", stale, "versions"),
        Record(name, "simulated staleness", fmean(one.mean_staleness for one in simulated), "versions"),
    ]
