"""A run's report, made from its metrics alone: text and a picture for people, ``report.json`` for programs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slime_core.files import read_text, write_whole
from slime_core.metrics import eval_scores
from slime_core.words import counted, duration
from slime_launch.console import RunConsole
from slime_launch.output_dir import find_run_dir
from slime_launch.step_metrics import example_line
from slime_launch.tracking import TENSORBOARD_DIR, Row, read_rows

if TYPE_CHECKING:
    from slime_core.types import Account
    from slime_launch.preflight import Checked

REPORT_FILE = "report.json"
CURVE_FILE = "reward_curve.png"
LOSS_CURVE_FILE = "loss_curve.png"
REWARD = "rollout/raw_reward"
LOSS = "train/loss"
HELD_OUT_LOSS = re.compile(r"eval/(?P<name>.+)/loss")
PHASES = {
    "rollout": "generate and score",
    "data": "· read rows",
    "generate": "· generate",
    "reward": "· score what is left",
    "train": "train",
    "update_weights": "send weights",
    "weight_canary": "· compare log-probs",
    "step": "whole step",
}
PARTS_OF_ROLLOUT = ("data", "generate", "reward")
ROUNDING = 0.01  # of clocks in two processes
FIRST_AND_LAST = ("in the first rollout", "in the last rollout")
BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
HEIGHT = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A run in figures.

    Attributes:
        minutes: Wall time of this start of the run, engines' start-up included; 0 if nothing had to be done.
        training_minutes: Wall time of all steps, those before a restart included.
        eval_before: Mean reward of each held-out set before the first rollout; its loss in a run on a data set.
        eval_after: The same in the last evaluation.
        evals: Rollouts trained on before each evaluation, and the mean reward of each held-out set then.
        samples_before: Some answers to held-out prompts before the first rollout; without those, samples of the first
            rollout.
        samples_after: The same in the last evaluation; without held-out prompts, samples of the last rollout.
        samples_of: ``held-out prompts`` or ``rollouts``: what the samples are of.
        rewards: Mean reward of each rollout; none in a run on a data set.
        losses: Mean loss of each rollout's steps.
        unscored: Samples that could not be scored.
        seconds: Mean seconds per rollout of each phase.
        run_dir: The run's output directory.
        ledger: What became of all samples, ``generated`` and the others of `slime_rollout.data.Ledger.counts`, and
            ``stale``: how often one was generated again because it was too old. ``None`` where nobody counted.
        ledger_balances: Whether they add up.
        evaluated: What was evaluated where nothing was trained, and after which step it was saved, if that is known.
    """

    rollouts: int
    steps: int
    minutes: float
    training_minutes: float
    eval_before: dict[str, float]
    eval_after: dict[str, float]
    evals: list[tuple[int, dict[str, float]]]
    samples_before: list[dict[str, Any]]
    samples_after: list[dict[str, Any]]
    samples_of: str
    rewards: list[float]
    losses: list[float]
    unscored: int
    seconds: dict[str, float]
    run_dir: str
    tensorboard_dir: str | None
    logs_dir: str
    checkpoint_dir: str | None
    reward_curve: str | None
    loss_curve: str | None
    ledger: dict[str, int] | None = None
    ledger_balances: bool = True
    evaluated: str | None = None


def make_report(
    rows: Sequence[Row],
    *,
    output_dir: Path,
    checkpoint: Path | None,
    minutes: float,
    account: Account | None = None,
    evaluated: str | None = None,
) -> Report:
    """Summarize a run from its metrics.

    ``checkpoint`` is its last one, ``minutes`` the wall time of this start, ``account`` what became of the samples, and
    ``evaluated`` what an evaluation alone was of.
    """
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    evals = sorted((row for row in rows if row["kind"] == "eval"), key=lambda row: row["rollout_id"])
    before = evals[0] if evals and evals[0]["rollout_id"] == 0 else {}
    answered = evals if any("samples" in row for row in evals) else []
    first, last = (before, answered[-1]) if answered else (rollouts[0], rollouts[-1]) if rollouts else ({}, {})
    tensorboard = output_dir / TENSORBOARD_DIR
    rewards, losses = [row[REWARD] for row in rollouts if row.get(REWARD) is not None], _mean_losses(rows)
    on_data = bool(losses) and not rewards
    return Report(
        rollouts=len(rollouts),
        steps=sum(row["kind"] == "train" for row in rows),
        minutes=minutes,
        training_minutes=sum(row.get("perf/step_time", 0.0) for row in rollouts) / 60,
        eval_before=scores_of(before),
        eval_after=scores_of(evals[-1]) if evals else {},
        evals=[(row["rollout_id"], scores_of(row)) for row in evals],
        samples_before=first.get("samples", []),
        samples_after=last.get("samples", []) if last is not first else [],
        samples_of="held-out prompts" if answered else "rollouts",
        rewards=rewards,
        losses=losses,
        unscored=_sum(rollouts, "rollout/reward_failures"),
        seconds=_mean_seconds(rollouts),
        run_dir=str(output_dir),
        tensorboard_dir=str(tensorboard) if tensorboard.exists() else None,
        logs_dir=str(output_dir / "logs"),
        checkpoint_dir=str(checkpoint) if checkpoint is not None else None,
        reward_curve=str(output_dir / CURVE_FILE) if rewards else None,
        loss_curve=str(output_dir / LOSS_CURVE_FILE) if on_data else None,
        ledger=None if account is None else account.counts | {"stale": _sum(rollouts, "rollout/stale_samples")},
        ledger_balances=account is None or account.problem is None,
        evaluated=evaluated,
    )


def write_report(report: Report) -> None:
    """Write the picture and then ``report.json`` into the run's directory."""
    if report.reward_curve is not None:
        save_curve(report.rewards, Path(report.reward_curve), report.evals)
    if report.loss_curve is not None:
        save_curve(report.losses, Path(report.loss_curve), report.evals, title="loss")
    write_whole(Path(report.run_dir) / REPORT_FILE, json.dumps(dataclasses.asdict(report), indent=1) + "\n")


def is_reported(report: Report) -> bool:
    """Whether ``report.json`` exists and covers the same rollouts, not only the first part of a longer run."""
    path = Path(report.run_dir) / REPORT_FILE
    return path.exists() and json.loads(read_text(path))["rollouts"] == report.rollouts


def report_lines(report: Report) -> list[str]:
    """The report as text."""
    on_data = report.loss_curve is not None
    lines = ["", f"{done_words(report)}{f', in {duration(60 * report.minutes)}' if report.minutes else ''}"]
    measure = "loss" if on_data else "mean reward"
    for name, after in report.eval_after.items():
        before = report.eval_before.get(name)
        change = f"{before:.3f} → {after:.3f}" if before is not None and report.rollouts else f"{after:.3f}"
        lines.append(f"{measure} on {name}: {change}")
    titles = FIRST_AND_LAST
    if report.samples_of == "held-out prompts":
        titles = ("before training", "after training") if report.rollouts else ("held-out prompts",) * 2
    for title, samples in zip(titles, (report.samples_before, report.samples_after), strict=True):
        # Rows of a data set were shown at the first step, and training has not changed them.
        lines += [title, *(f"  {example_line(example)}" for example in samples)] if samples and not on_data else []
    if report.ledger is not None and report.ledger["generated"]:
        lines.append(ledger_line(report.ledger, balances=report.ledger_balances, of_data=on_data))
    if len(report.rewards) > 1:
        lines += ["", "mean reward per rollout", *draw_chart(report.rewards)]
    if on_data and len(report.losses) > 1:
        lines += ["", "loss per rollout", *draw_chart(report.losses)]
    if report.seconds:
        lines += ["", "mean seconds per rollout"]
        titles_of = _titles(report.seconds)
        width = max(map(len, titles_of.values()))
        lines += [f"  {title:<{width}} {report.seconds[key]:8.2f}" for key, title in titles_of.items()]
    lines += ["", f"metrics, report.json  {report.run_dir}"]
    lines.append(f"a page about the run  slime-launch report {report.run_dir}")
    for title, curve in (("reward", report.reward_curve), ("loss", report.loss_curve)):
        if curve is not None:
            lines.append(f"{title + ' curve':<21} {curve}")
    if report.tensorboard_dir is not None:
        lines.append(f"TensorBoard           tensorboard --logdir {Path(report.run_dir).parent}")
    lines.append(f"logs                  {report.logs_dir}")
    if report.evaluated is None:
        lines.append(f"checkpoint            {report.checkpoint_dir or 'none; --save DIR writes one'}")
    if report.unscored:
        lines.append(
            f"{counted(report.unscored, 'sample')} could not be scored; {report.logs_dir}/rollout.log says why"
        )
    return lines


def done_words(report: Report) -> str:
    """The first words of a report, such as ``trained for 3 steps``."""
    if report.evaluated is not None:
        return f"evaluated {report.evaluated}"
    steps = counted(report.rollouts, "step")
    if not report.steps:
        return f"generated {counted(report.rollouts, 'rollout')}"
    more = "" if report.steps == report.rollouts else f" of {counted(report.steps, 'optimizer step')}"
    return f"trained for {steps}{more}"


def scoring_problem(report: Report, samples_per_rollout: int) -> str | None:
    """An error line if more than half of the samples could not be scored: the run was trained on failures mostly."""
    total = report.rollouts * samples_per_rollout
    if 2 * report.unscored <= total:
        return None
    return (
        f"{report.unscored:,} of {counted(total, 'sample')} could not be scored, more than half, so the run ends "
        f"with exit code 1; {report.logs_dir}/rollout.log says why. Correct the reward, which `slime-rollout "
        "check-hooks --run` tries out, and train again"
    )


def ledger_line(counts: Mapping[str, int], *, balances: bool, of_data: bool = False) -> str:
    """How many samples were trained on, filtered and so on, as a sum; those ``of_data`` were read, not generated."""
    waiting = counts["buffered"] + counts["out"]
    terms = {"trained": counts["trained"], "filtered": counts["filtered"], "aborted": counts["aborted"]}
    right = " + ".join(f"{count:,} {name}" for name, count in (terms | {"waiting": waiting}).items())
    again = f"; {counts['stale']:,} generated again as too old" if counts["stale"] else ""
    came = "read" if of_data else "generated"
    return f"samples: {counts['generated']:,} {came} {'=' if balances else '≠'} {right}{again}"


def report_if_finished(checked: Checked, output_dir: Path) -> bool:
    """If the run in ``--save`` is trained to ``--num-rollout`` and evaluated there, say so and report again."""
    manifest, settings = checked.manifest, checked.settings
    if manifest is None or manifest.iteration < settings.num_rollout or settings.kind.only_evaluates:
        return False
    save = Path(str(settings.megatron.save))
    # Another --output-dir may have been given this time.
    places = (find_run_dir(place, save) for place in (output_dir, Path(manifest.output_dir)))
    output_dir = next((place for place in places if place is not None), Path(manifest.output_dir))
    rows = read_rows(output_dir)
    evaluated = any(row["kind"] == "eval" and row["rollout_id"] >= settings.num_rollout for row in rows)
    if settings.rollout.evaluation.has_eval_sets and not evaluated:
        return False
    checkpoint = save / manifest.checkpoint if manifest.checkpoint is not None else None
    console = RunConsole()
    steps = counted(manifest.iteration, "step")
    console.line(f"the run in {save} is finished after {steps}; give a larger --num-rollout to go on")
    report = make_report(rows, output_dir=output_dir, checkpoint=checkpoint, minutes=0.0)
    if output_dir.is_dir() and not is_reported(report):  # it was killed after its last checkpoint
        write_report(report)
    for line in report_lines(report):
        console.line(line)
    return True


def draw_chart(values: Sequence[float], *, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Rows of block characters, top first, with the scale at the left; more than ``width`` values are averaged."""
    columns = _shrink(values, width)
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    eighths = [round((value - low) / span * (height * 8 - 1)) + 1 for value in columns]
    rows = []
    for row in reversed(range(height)):
        label = f"{high:.3g}" if row == height - 1 else f"{low:.3g}" if row == 0 else ""
        cells = "".join(BLOCKS[max(0, min(8, level - 8 * row))] for level in eighths)
        rows.append(f"{label:>8} ┤{cells}")
    return rows


def save_curve(
    values: Sequence[float],
    path: Path,
    evals: Sequence[tuple[int, Mapping[str, float]]] = (),
    *,
    title: str = "mean reward",
) -> None:
    """Draw a number over rollouts as a PNG, and the points of evaluations: after as many rollouts as they say."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(values) + 1), values, marker=".", linewidth=1.2, label="trained on")
    for name in dict.fromkeys(name for _, scores in evals for name in scores):
        points = [(iteration, scores[name]) for iteration, scores in evals if name in scores]
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="--", linewidth=0.8, label=name)
    if evals:
        axes.legend()
    axes.set(xlabel="rollout", ylabel=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _mean_losses(rows: Sequence[Row]) -> list[float]:
    """Mean loss of the steps of each rollout."""
    losses: dict[int, list[float]] = {}
    for row in rows:
        if row["kind"] == "train" and row.get(LOSS) is not None:
            losses.setdefault(row["rollout_id"], []).append(row[LOSS])
    return [fmean(values) for values in losses.values()]


def scores_of(row: Row) -> dict[str, float]:
    """The score of each held-out set in an evaluation, or the loss where rows were not scored."""
    found = {name: match["name"] for name in row if (match := HELD_OUT_LOSS.fullmatch(name))}
    return eval_scores(row) or {set_name: row[name] for name, set_name in found.items()}


def _mean_seconds(rollouts: Sequence[Row]) -> dict[str, float]:
    """Mean of every ``perf/<phase>_time`` over all rollouts, 0 in those that lack it: so parts add up to the whole."""
    names = dict.fromkeys(
        name for row in rollouts for name in row if name.startswith("perf/") and name.endswith("_time")
    )
    return {
        name.removeprefix("perf/").removesuffix("_time"): fmean(row.get(name) or 0.0 for row in rollouts)
        for name in names
    }


def _sum(rows: Sequence[Row], name: str) -> int:
    return int(sum(row.get(name) or 0.0 for row in rows))


def _titles(seconds: dict[str, float]) -> dict[str, str]:
    """Phases in the order of a step, with the trainer's own phases below `train`."""
    titles: dict[str, str] = {}
    parts = sum(seconds.get(key, 0.0) for key in PARTS_OF_ROLLOUT)
    ahead = parts > seconds.get("rollout", 0.0) * (1 + ROUNDING)  # they were done while the trainers were at work
    other = {"rollout": "read and split rows", "update_weights": None} if "data" in seconds else {}
    for key, title in PHASES.items():
        if key in seconds and (shown := other.get(key, title)) is not None:
            titles[key] = f"{shown}, ahead" if ahead and key in PARTS_OF_ROLLOUT else shown
        if key == "train":
            titles |= {name: f"· {name}" for name in seconds if name not in PHASES}
    return titles


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    return [fmean(values[start:stop]) for start, stop in pairwise(edges)]
