"""What a run came to, made from its metrics alone: for people as text and picture, for programs as ``report.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from slime_core.files import write_whole
from slime_core.metrics import eval_scores
from slime_launch.chart import draw_chart, save_curve
from slime_launch.tracking import TENSORBOARD_DIR, Row

REPORT_FILE = "report.json"
CURVE_FILE = "reward_curve.png"
REWARD = "rollout/raw_reward"
PHASES = {
    "rollout": "generate and score",
    "generate": "· generate",
    "reward": "· score what is left",
    "train": "train",
    "update_weights": "send weights",
    "step": "whole step",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A run in figures.

    Attributes:
        rollouts: Rollouts trained on.
        steps: Optimizer steps.
        minutes: Wall time of this start of the run, engines' start-up included; 0 if nothing had to be done.
        training_minutes: Wall time of all steps, those before a restart included.
        eval_before: Mean reward of each held-out set before the first rollout.
        eval_after: The same in the last evaluation.
        rewards: Mean reward of each rollout.
        unscored: Samples that could not be scored.
        seconds: Mean seconds per rollout of each phase.
        run_dir: The run's output directory.
        tensorboard_dir: Where TensorBoard's files are; ``None`` without them.
        logs_dir: Logs of launcher, trainer ranks, engines and router.
        checkpoint_dir: The last checkpoint; ``None`` without ``--save``.
        reward_curve: Picture of ``rewards``.
    """

    rollouts: int
    steps: int
    minutes: float
    training_minutes: float
    eval_before: dict[str, float]
    eval_after: dict[str, float]
    rewards: list[float]
    unscored: int
    seconds: dict[str, float]
    run_dir: str
    tensorboard_dir: str | None
    logs_dir: str
    checkpoint_dir: str | None
    reward_curve: str


def make_report(rows: Sequence[Row], *, output_dir: Path, checkpoint: Path | None, minutes: float) -> Report:
    """Sum a run up.

    Args:
        rows: From :mod:`slime_launch.tracking`.
        output_dir: The run's directory.
        checkpoint: The last checkpoint's directory.
        minutes: Wall time of this start.
    """
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    evals = sorted((row for row in rows if row["kind"] == "eval"), key=lambda row: row["rollout_id"])
    before = evals[0] if evals and evals[0]["rollout_id"] == 0 else {}
    tensorboard = output_dir / TENSORBOARD_DIR
    return Report(
        rollouts=len(rollouts),
        steps=sum(row["kind"] == "train" for row in rows),
        minutes=minutes,
        training_minutes=sum(row.get("perf/step_time", 0.0) for row in rollouts) / 60,
        eval_before=eval_scores(before),
        eval_after=eval_scores(evals[-1]) if evals else {},
        rewards=[row[REWARD] for row in rollouts if row.get(REWARD) is not None],
        unscored=int(sum(row.get("rollout/reward_failures", 0.0) for row in rollouts)),
        seconds=_mean_seconds(rollouts),
        run_dir=str(output_dir),
        tensorboard_dir=str(tensorboard) if tensorboard.exists() else None,
        logs_dir=str(output_dir / "logs"),
        checkpoint_dir=str(checkpoint) if checkpoint is not None else None,
        reward_curve=str(output_dir / CURVE_FILE),
    )


def write_report(report: Report) -> None:
    """Write the picture and then ``report.json`` into the run's directory."""
    save_curve(report.rewards, Path(report.reward_curve))
    write_whole(Path(report.run_dir) / REPORT_FILE, json.dumps(dataclasses.asdict(report), indent=1) + "\n")


def is_reported(report: Report) -> bool:
    """Whether ``report.json`` is there and tells of the same rollouts, not of the first part of a longer run."""
    path = Path(report.run_dir) / REPORT_FILE
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["rollouts"] == report.rollouts


def report_lines(report: Report) -> list[str]:
    """The report as text."""
    minutes = f", in {report.minutes:.1f} min" if report.minutes else ""
    lines = ["", f"trained on {report.rollouts} rollouts, {report.steps} optimizer steps{minutes}"]
    for name, after in report.eval_after.items():
        before = report.eval_before.get(name)
        change = f"{before:.3f} → {after:.3f}" if before is not None else f"{after:.3f}"
        lines.append(f"mean reward on {name}: {change}")
    if report.unscored:
        lines.append(f"samples that could not be scored: {report.unscored}; logs/rollout.log says why")
    if len(report.rewards) > 1:
        lines += ["", "mean reward per rollout", *draw_chart(report.rewards)]
    if report.seconds:
        lines += ["", "mean seconds per rollout"]
        lines += [f"  {title:<22} {report.seconds[key]:8.2f}" for key, title in _titles(report.seconds).items()]
    lines += ["", f"metrics, report.json  {report.run_dir}", f"reward curve          {report.reward_curve}"]
    if report.tensorboard_dir is not None:
        lines.append(f"TensorBoard           tensorboard --logdir {Path(report.run_dir).parent}")
    lines.append(f"logs                  {report.logs_dir}")
    lines.append(f"checkpoint            {report.checkpoint_dir or 'none; --save DIR writes one'}")
    return lines


def _mean_seconds(rollouts: Sequence[Row]) -> dict[str, float]:
    """Mean of every ``perf/<phase>_time``, over the rollouts that have it."""
    names = dict.fromkeys(
        name for row in rollouts for name in row if name.startswith("perf/") and name.endswith("_time")
    )
    return {
        name.removeprefix("perf/").removesuffix("_time"): fmean(
            row[name] for row in rollouts if row.get(name) is not None
        )
        for name in names
    }


def _titles(seconds: dict[str, float]) -> dict[str, str]:
    """Phases in the order of a step; the trainer's own ones, whatever they are, stand below `train`."""
    titles: dict[str, str] = {}
    for key, title in PHASES.items():
        if key in seconds:
            titles[key] = title
        if key == "train":
            titles |= {name: f"· {name}" for name in seconds if name not in PHASES}
    return titles
