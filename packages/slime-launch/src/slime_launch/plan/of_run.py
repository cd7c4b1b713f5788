"""The profile of finished runs, from what they left: ``metrics.jsonl``, ``settings.json`` and the engines' logs.

What those do not have is a guess, and `Profile.notes` says so: the lengths between minimum, median, mean and maximum;
how an engine's speed depends on the number of responses, where neither its log nor runs of several batch sizes show it;
what a prompt costs apart from its response; and which part of a hand-over belongs to which phase. A run in which
engines and trainers take turns shows more than one in which they overlap; both together show how much slower they are
together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from slime_core.errors import DataError
from slime_core.files import read_json
from slime_launch.errors import ProfileError
from slime_launch.plan.profile import EngineSpeed, LoopSpeed, Points, Profile, TrainerSpeed, mean_of
from slime_launch.plan.setup import Setup, setup_of, sleeps
from slime_launch.plan.simulate import simulate
from slime_launch.tracking import METRICS_FILE, Row, read_rows

SETTINGS_FILE = "settings.json"
DEFAULT_RUNNING = 128
LEAST_SPREAD = 0.05
"""Relative spread below which two effects cannot be told apart."""
LOG_LINES = 3
"""Lines of an engine's log that a point of its speed needs."""
DECODE = re.compile(r"Decode batch.*#running-req: (\d+).*gen throughput \(token/s\): ([\d.]+)")
CALIBRATED_STEPS = 24
MOST_BENT = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """One run: its flags by their names in Python, its rows, and the rows of its rollouts but the first."""

    directory: Path
    flags: Mapping[str, Any]
    rows: list[Row]
    rollouts: list[Row]

    @property
    def setup(self) -> Setup:
        return setup_of(self.flags, steps=CALIBRATED_STEPS)

    @property
    def overlaps(self) -> bool:
        return self.flags["async_buffer_size"] is not None

    def mean(self, name: str) -> float:
        """Mean of a metric over the rollouts that have it; 0 if none has."""
        found = [row[name] for row in self.rollouts if row.get(name) is not None]
        return fmean(found) if found else 0.0


def profile_of_runs(output_dirs: Sequence[Path]) -> Profile:
    """The profile of runs of one model on one kind of hardware; those of several batch sizes show most.

    The first rollout of each is left out, if there are others: it is slow.

    Raises:
        ProfileError: A directory has no finished rollout that was generated and trained on.
    """
    runs = [_read(Path(directory)) for directory in output_dirs]
    notes: list[str] = []
    gpus = {run.flags["rollout_num_gpus_per_engine"] for run in runs}
    if len(gpus) > 1:
        raise ProfileError(f"engines of {' and '.join(map(str, sorted(gpus)))} GPUs; give runs with one kind of engine")
    # Where halves overlap, neither is as fast as alone if they share a machine. So runs in which they take turns say
    # how fast each is, if there are any, and the others how much slower they are together.
    alone = [run for run in runs if not run.overlaps] or runs
    hand_over = _hand_over(runs)
    lengths, decode = _lengths(runs, notes), _decode(alone, notes)
    trainer = _trainer(alone, (hand_over or 0.0) / 3, notes)
    loop = _loop(alone, hand_over, notes)
    profile = Profile(
        lengths=lengths,
        dropped=_dropped(runs),
        reward_seconds=fmean(run.mean("perf/reward_time") for run in alone),
        engine=EngineSpeed(gpus=gpus.pop(), decode=decode, most_running=max(map(_most_running, runs))),
        trainer=trainer,
        loop=dataclasses.replace(loop, overlap_slowdown=_slowdown(trainer, runs if len(alone) < len(runs) else [])),
    )
    return dataclasses.replace(_calibrated(profile, runs, notes), notes=tuple(notes))


def _read(directory: Path) -> _Run:
    try:
        found = read_json(directory / SETTINGS_FILE)["settings"]
    except (OSError, ValueError, KeyError, TypeError, DataError):
        raise ProfileError(f"{directory} has no {SETTINGS_FILE} of a run; give the --output-dir of one") from None
    rows = read_rows(directory)
    rollouts = [
        row
        for row in rows
        if row["kind"] == "rollout" and row.get("perf/generate_time") is not None and row.get("rollout/response_tokens")
    ]
    if not rollouts or not any(row["kind"] == "train" for row in rows):
        raise ProfileError(
            f"{directory / METRICS_FILE} has no rollout that was generated and trained on; give a run of both halves"
        )
    flags = {name: entry["value"] for name, entry in found.items()}
    return _Run(directory=directory, flags=flags, rows=rows, rollouts=rollouts[1:] or rollouts)


def _lengths(runs: Sequence[_Run], notes: list[str]) -> Points:
    """Parts of all responses and their lengths, such that minimum, median, mean, maximum and truncated part fit."""
    rows = [row for run in runs for row in run.rollouts]
    least, middle, mean, most = (
        fmean(row[f"rollout/response_len/{name}"] for row in rows) for name in ("min", "median", "mean", "max")
    )
    samples = fmean(run.setup.prompts * run.setup.samples for run in runs)
    cut = fmean(row.get("rollout/truncated_ratio") or 0.0 for row in rows)
    if cut > 0.5 and middle < most:  # they were cut at lengths of their own, as a user-defined function may ask for
        cut = 0.0
    top = 1 - max(cut, 1 / (samples + 1))
    if top <= 0.5 or most <= middle:  # half of them and more are as long as they may be
        inner = [(max(1e-6, 1 - cut) if cut < 1 else 1e-6, most)] if least < most else []
        return ((0.0, max(1.0, least)), *inner, (1.0, max(1.0, most)))
    notes.append("lengths: between minimum, median, mean and maximum of each rollout they are a smooth guess")
    if mean_of(_bent(least, middle, most, top, MOST_BENT)) > mean:  # of so few samples the longest says little
        top = 1.0
    low, high = 1 / MOST_BENT, MOST_BENT
    for _ in range(60):
        bend = (low * high) ** 0.5
        points = _bent(least, middle, most, top, bend)
        low, high = (bend, high) if mean_of(points) > mean else (low, bend)
    return points


def _bent(least: float, middle: float, most: float, top: float, bend: float) -> Points:
    """Lengths grow from the median to the longest as a power of the part."""
    parts = np.linspace(0.0, 1.0, 17)[1:]
    upper = [(0.5 + (top - 0.5) * part, min(most, middle + (most - middle) * part**bend)) for part in parts.tolist()]
    last = [] if top == 1 else [(1.0, most)]
    return tuple((part, max(1.0, tokens)) for part, tokens in [(0.0, least), (0.5, middle), *upper, *last])


def _dropped(runs: Sequence[_Run]) -> float:
    """Part of the groups that a filter dropped."""
    kept = sum(run.setup.prompts * len(run.rollouts) for run in runs)
    metrics = [metric for run in runs for row in run.rollouts for metric in row.items()]
    dropped = sum(value for name, value in metrics if name.startswith("rollout/dynamic_filter/drop_") and value)
    return float(dropped / (kept + dropped))


def _most_running(run: _Run) -> int:
    given = run.flags.get("sglang_max_running_requests")
    here = -(-run.setup.prompts * run.setup.samples // run.setup.engines)
    return int(given) if given else max(DEFAULT_RUNNING, here)


def _decode(runs: Sequence[_Run], notes: list[str]) -> Points:
    """Speed of an engine by the number of responses: from its log, or as the times of rollouts say."""
    points = _of_logs(runs)
    # An engine writes a line for every 40 tokens: of short responses those with most running are missed.
    if len(points) > 1 and points[-1][0] >= max(map(_in_flight, runs)) / 2:
        return points
    if any(run.overlaps for run in runs):
        return points if len(points) > 1 else _of_flow(runs, notes)
    # A step of r responses takes each + shared · r seconds: a rollout each · longest + shared · tokens of an engine.
    times = np.array([row["perf/generate_time"] for run in runs for row in run.rollouts])
    longest = np.array([row["rollout/response_len/max"] for run in runs for row in run.rollouts])
    tokens = np.array([row["rollout/response_tokens"] / run.setup.engines for run in runs for row in run.rollouts])
    each, shared = _two_parts(longest, tokens, times)
    if (each is None or shared is None) and len(points) > 1:
        return points
    if each is None or shared is None:
        notes.append(
            "engine.decode: whether responses slow each other down cannot be seen in rollouts that are all alike; half "
            "of the time is taken to be shared. Give runs of several --rollout-batch-size"
        )
        each, shared = fmean(times / longest) / 2, fmean(times / tokens) / 2
    most = max(map(_most_running, runs))
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    return tuple((float(count), count / (each + shared * count)) for count in counts)


def _in_flight(run: _Run) -> float:
    """Responses of an engine at a time, at most."""
    setup = run.setup
    return min(setup.prompts * setup.samples * (setup.ahead or 1), setup.concurrency) / setup.engines


def _of_logs(runs: Sequence[_Run]) -> Points:
    """Points of SGLang's own lines about decoding; between powers of two, and each the upper quartile."""
    found: dict[int, list[tuple[int, float]]] = {}
    for run in runs:
        for path in sorted((run.directory / "logs").glob("engine_*.log")):
            with path.open(encoding="utf-8", errors="replace") as lines:
                for match in filter(None, map(DECODE.search, lines)):
                    running, speed = int(match[1]), float(match[2])
                    if running and speed:
                        found.setdefault(running.bit_length(), []).append((running, speed))
    points: list[tuple[float, float]] = []
    for _, pairs in sorted(found.items()):
        if len(pairs) >= LOG_LINES:
            middle = float(np.quantile([running for running, _ in pairs], 0.5))
            upper = float(np.quantile([speed for _, speed in pairs], 0.75))  # a line after a wait is too slow
            points.append((middle, max([upper, *(before for _, before in points)])))
    return tuple(points)


def _of_flow(runs: Sequence[_Run], notes: list[str]) -> Points:
    """One point: tokens per second where engines generate without an end, at the responses that are in flight."""
    notes.append(
        "engine.decode: from a run that overlaps only the speed at one number of responses is seen; more responses are "
        "taken to be no faster. Give a run without --async-buffer-size"
    )
    run = next(run for run in runs if run.overlaps)
    speed = run.mean("rollout/response_tokens") / _interval(run) / run.setup.engines
    return ((max(1.0, _in_flight(run)), max(1e-9, speed)),)


def _two_parts(first: Any, second: Any, times: Any) -> tuple[float | None, float | None]:
    """Factors of two effects that add up to times, neither below 0; ``None`` where they go together."""
    ratio = second / np.maximum(first, 1e-12)
    if len(times) < 3 or np.std(ratio) <= LEAST_SPREAD * abs(np.mean(ratio)):
        return None, None
    # What each row is off by is measured against its time, so that long rollouts do not count for more.
    (one, other), *_ = np.linalg.lstsq(np.stack([first / times, second / times], axis=1), np.ones(len(times)))
    if one < 0:
        return 0.0, float(np.mean(times / second))
    if other < 0:
        return float(np.mean(times / first)), 0.0
    return float(one), float(other)


def _trainer(runs: Sequence[_Run], moving: float, notes: list[str]) -> TrainerSpeed:
    gpus = runs[0].setup.actor_gpus
    steps = np.array([float(run.setup.optimizer_steps) for run in runs for _ in run.rollouts])
    tokens = np.array(
        [row["rollout/response_tokens"] * gpus / run.setup.actor_gpus for run in runs for row in run.rollouts]
    )
    times = np.array([max(1e-9, row["perf/train_time"] - moving) for run in runs for row in run.rollouts])
    fixed, each = _two_parts(steps, tokens, times)
    if fixed is None or each is None:
        notes.append(
            "trainer.fixed_seconds: the part of a step that more GPUs do not make shorter cannot be seen in rollouts "
            "that are all alike; it is taken to be 0. Give runs of several --rollout-batch-size"
        )
        fixed, each = 0.0, fmean(times) / fmean(tokens)
    sent = [row["perf/update_weights_time"] for run in runs for row in run.rollouts if row["perf/update_weights_time"]]
    send = max(0.0, fmean(sent) - moving) if sent else 0.0
    return TrainerSpeed(gpus=gpus, token_seconds=each, fixed_seconds=fixed, send_seconds=send)


def _slowdown(trainer: TrainerSpeed, runs: Sequence[_Run]) -> float:
    """How many times as long trainers take beside engines at work, from runs in which they overlap."""
    found = [
        row["perf/train_time"] / trainer.seconds(row["rollout/response_tokens"], run.setup.actor_gpus, steps)
        for run in runs
        if run.overlaps
        for steps in [run.setup.optimizer_steps]
        for row in run.rollouts
    ]
    return max(1.0, median(found)) if found else 1.0


def _hand_over(runs: Sequence[_Run]) -> float | None:
    found = [
        row["perf/sleep_time"] + row["perf/wake_up_time"]
        for run in runs
        for row in run.rollouts
        if "perf/sleep_time" in row
    ]
    return fmean(found) if found else None


def _loop(runs: Sequence[_Run], hand_over: float | None, notes: list[str]) -> LoopSpeed:
    """The time between the phases that are measured."""
    moving = (hand_over or 0.0) / 3
    if hand_over:
        notes.append("loop.hand_over_seconds: a third of it is taken to be in each of generating, training and sending")
    prepare = fmean(
        run.mean("perf/rollout_time") - run.mean("perf/generate_time") - run.mean("perf/reward_time") for run in runs
    )
    evaluations = [row["perf/eval_time"] for run in runs for row in run.rows if "perf/eval_time" in row]
    plain, saving = _gaps(runs)
    between = median(plain) if plain else 0.0
    return LoopSpeed(
        prepare_seconds=max(0.0, prepare - moving),
        between_seconds=between,
        save_seconds=max(0.0, median(saving) - between) if saving else 0.0,
        evaluate_seconds=fmean(evaluations) if evaluations else 0.0,
        hand_over_seconds=hand_over,
    )


def _gaps(runs: Iterable[_Run]) -> tuple[list[float], list[float]]:
    """Seconds between records that no phase has, without evaluations; apart from them those with a checkpoint."""
    plain: list[float] = []
    saving: list[float] = []
    for run in runs:
        rollouts = [row for row in run.rows if row["kind"] == "rollout"]
        evaluated = {row["rollout_id"]: row["perf/eval_time"] for row in run.rows if "perf/eval_time" in row}
        interval = run.flags["save_interval"] if run.flags["save"] is not None else None
        for before, row in pairwise(rollouts):
            done = before["rollout_id"] + 1
            gap = row["time"] - before["time"] - row["perf/step_time"] - evaluated.get(done, 0.0)
            saved = done + sleeps(run.flags, "train")  # trainers that sleep save before they do
            (saving if interval and saved % interval == 0 else plain).append(max(0.0, gap))
    return plain, saving


def _interval(run: _Run) -> float:
    """Mean seconds from one record to the next, but for evaluations and checkpoints."""
    return fmean(row["perf/step_time"] for row in run.rollouts)


def _calibrated(profile: Profile, runs: Sequence[_Run], notes: list[str]) -> Profile:
    """Engines as much faster or slower as the simulation needs to take as long as the runs did."""
    turns = [run for run in runs if not run.overlaps]
    if turns:
        measured = sum(run.mean("perf/generate_time") for run in turns)
        foreseen = sum(_generating(profile, run.setup) for run in turns)
        return _faster(profile, foreseen / max(measured, 1e-9))
    run = max(runs, key=lambda one: one.mean("perf/rollout_time") / _interval(one))
    if run.mean("perf/rollout_time") < 0.1 * _interval(run):
        notes.append("engine.decode: the trainers hardly waited in this run; the engines may be faster than this")
        return profile
    low, high = 0.2, 5.0
    setup = dataclasses.replace(run.setup, save_interval=None, evaluate_interval=None)
    for _ in range(12):
        factor = (low * high) ** 0.5
        seconds = 3600 / simulate(_faster(profile, factor), setup).steps_per_hour - profile.loop.between_seconds
        low, high = (factor, high) if seconds > _interval(run) else (low, factor)
    return _faster(profile, factor)


def _generating(profile: Profile, setup: Setup) -> float:
    """Seconds of generation of a rollout, where nothing else takes time."""
    alone = dataclasses.replace(profile, trainer=TrainerSpeed(token_seconds=0.0), loop=LoopSpeed(), reward_seconds=0.0)
    setup = dataclasses.replace(setup, save_interval=None, evaluate_interval=None, hands_over=False)
    return 3600 / simulate(alone, setup).steps_per_hour


def _faster(profile: Profile, factor: float) -> Profile:
    decode = tuple((running, speed * factor) for running, speed in profile.engine.decode)
    return dataclasses.replace(profile, engine=dataclasses.replace(profile.engine, decode=decode))
