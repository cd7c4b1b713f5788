"""From what the two halves report to named metrics and to the line of a step."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from slime_core.types import EvalReport, SyncReport, TrainReport
from slime_core.words import duration
from slime_rollout.service import EXAMPLES, NO_ADVANTAGE, Example, ReadyRollout, examples

REASON_CHARACTERS = 100
PROMPT_CHARACTERS, RESPONSE_CHARACTERS, PART_CHARACTERS = 80, 120, 40
RECENT = 10
ROUNDING = 5e-8  # less is what float32 leaves of 0
DRIFT = "train/train_rollout_logprob_abs_diff"
PASS_RATES = "passrate/"
NOT_OF_SAMPLES = ("tokens_per_second",)  # reported as perf/
OF_ROLLOUT = ("kl",)  # of a step's samples before the first step: reported as rollout/, the mean over the steps


def train_rows(report: TrainReport) -> list[dict[str, float]]:
    """``train/*`` of each optimizer step."""
    return [{f"train/{name}": value for name, value in step.items() if name not in OF_ROLLOUT} for step in report.steps]


def rollout_row(
    batch: ReadyRollout, report: TrainReport, sync: SyncReport, seconds: Mapping[str, float]
) -> dict[str, float]:
    """``rollout/*`` and ``perf/*`` of one rollout; ``seconds`` is the wall time of the loop's own phases."""
    row = {
        name if name.startswith(PASS_RATES) else f"rollout/{name}": value
        for name, value in batch.metrics.items()
        if name not in NOT_OF_SAMPLES
    }
    for name in OF_ROLLOUT:
        if found := [step[name] for step in report.steps if name in step]:
            row[f"rollout/{name}"] = fmean(found)
    phases = {**batch.seconds, **report.seconds, **seconds}
    row |= {f"perf/{name}_time": value for name, value in phases.items()}
    row |= {f"perf/{name}_tokens": float(value) for name, value in report.tokens.items() if value}
    row |= {f"perf/{name}": value for name, value in report.performance.items()}
    row["perf/update_weights_bytes"] = float(sync.bytes)
    step_time = sum(seconds.values())
    row["perf/step_time"] = step_time
    if report.steps and step_time:
        row["perf/wait_time_ratio"] = 1.0 - seconds["train"] / step_time
    return row | {f"perf/{name}": batch.metrics[name] for name in NOT_OF_SAMPLES if name in batch.metrics}


def eval_row(report: EvalReport) -> dict[str, float]:
    """``eval/*`` of every held-out set, as :func:`slime_core.metrics.eval_metrics` names them."""
    return report.metrics | {"perf/eval_time": report.seconds}


def eval_title(step: int, *, alone: bool = False) -> str:
    """When an evaluation was: after which step; ``alone`` it is of weights whose step may be unknown, which is 0."""
    return f"eval after step {step}" if step else "eval" if alone else "eval before step 1"


def eval_line(report: EvalReport, *, alone: bool = False) -> str:
    """About an evaluation: each set's score, its pass@k of the largest k where k is above 1, and samples of each.

    They are of the same prompts each time, so that one sees what changes.
    """
    words = []
    for name, score in report.scores.items():
        tag = f"eval/{name}-pass@"
        rates = {int(key.removeprefix(tag)): rate for key, rate in report.metrics.items() if key.startswith(tag)}
        k = max(rates, default=1)
        parts = parts_words(report.metrics, f"eval/{name}/reward/")
        words.append(f"{name} {score:.3f}{parts}" + (f" (pass@{k} {rates[k]:.1%})" if k > 1 else ""))
    line = f"{eval_title(report.rollout_id, alone=alone)}: {'  '.join(words)}  {duration(report.seconds)}"
    return "\n".join([line, *example_lines(eval_examples(report))])


def eval_examples(report: EvalReport) -> list[Example]:
    """The first answers to the first prompts of each held-out set; of several sets each has its name as ``set``."""
    most = max(1, EXAMPLES // max(len(report.samples), 1))
    found = {name: examples(samples, most=most) for name, samples in report.samples.items()}
    if len(found) == 1:
        return next(iter(found.values()))
    return [{"set": name, **example} for name, shown in found.items() for example in shown]


def example_lines(shown: Sequence[Example], *, of_data: bool = False) -> list[str]:
    """Examples for the console: what was generated, or rows ``of_data``."""
    return [f"  {'a row' if of_data else 'for example'}: {example_line(example)}" for example in shown]


def held_out_row(sets: Mapping[str, Mapping[str, float]], seconds: Mapping[str, float]) -> dict[str, float]:
    """``eval/<set>/loss`` and the other metrics of every held-out set of rows."""
    row = {f"eval/{name}/{key}": value for name, metrics in sets.items() for key, value in metrics.items()}
    return row | {f"perf/{name}_time": value for name, value in seconds.items()}


def held_out_line(step: int, sets: Mapping[str, Mapping[str, float]], *, alone: bool = False) -> str:
    """About an evaluation: the loss of each held-out set of rows and, of pairs, the share in the right order."""
    words = []
    for name, metrics in sets.items():
        accuracy = f" (accuracy {metrics['accuracy']:.1%})" if "accuracy" in metrics else ""
        words.append(f"{name} loss {metrics['loss']:.4f}{accuracy}")
    return f"{eval_title(step, alone=alone)}: {'  '.join(words)}"


def example_line(example: Example) -> str:
    """The end of a prompt, the beginning of its response, and set and reward if it has them, in one line."""
    prompt, response = (" ".join(str(example[part]).split()) for part in ("prompt", "response"))
    prompt = prompt if len(prompt) <= PROMPT_CHARACTERS else f"…{prompt[-PROMPT_CHARACTERS:]}"
    response = response if len(response) <= RESPONSE_CHARACTERS else f"{response[:RESPONSE_CHARACTERS]}…"
    reward = example.get("reward")
    end = "" if reward is None else f" (reward {reward_words(reward)})"
    start = f"{example['set']}: " if "set" in example else ""
    return f"{start}{prompt} → {response}{end}"


def reward_words(reward: Any) -> str:
    """A reward for people: a number, or its parts by name, texts in them by their beginnings."""
    if isinstance(reward, int | float):
        return f"{reward:g}"
    parts = reward.items() if isinstance(reward, dict) else ()
    return ", ".join(f"{name} {_part(value)}" for name, value in parts)


def _part(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:g}"
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= PART_CHARACTERS else f"{text[:PART_CHARACTERS]}…"


def parts_words(row: Mapping[str, Any], start: str) -> str:
    """The means of a reward's further parts, whose names in ``row`` begin with ``start``, in brackets; or nothing."""
    means = {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
    return f" ({', '.join(f'{name} {value:.4g}' for name, value in means.items())})" if means else ""


def step_line(
    batch: ReadyRollout,
    num_rollout: int,
    row: Mapping[str, float],
    last_step: Mapping[str, float],
    *,
    compares_samples: bool,
) -> str:
    """One line about one rollout: what it was worth, what it did to the weights, and where the time went.

    ``compares_samples`` is whether rewards that are equal within every group change no weight.
    """
    words = [f"step {batch.rollout_id + 1:>{len(str(num_rollout))}}/{num_rollout}"]
    if "rollout/raw_reward" in row:
        words.append(f"reward {row['rollout/raw_reward']:.3f}{parts_words(row, 'rollout/reward/')}")
    if reasons := batch.failures:
        often = Counter(reasons).most_common(1)[0][0]
        what = f"{len(reasons)} of {batch.num_samples} not scored"
        words.append(f"({what}: {textwrap.shorten(often, REASON_CHARACTERS)}; logs/rollout.log)")
    elif compares_samples and row.get("rollout/zero_std/ratio") == 1:
        words.append("(equal within every group: no gradient)")
        others = {why: count for why, count in batch.untrained.items() if why != NO_ADVANTAGE}
        batch = dataclasses.replace(batch, untrained=others)
    words += untrained_words(batch)
    shown = (("loss", "loss"), ("accuracy", "accuracy"), ("kl_loss", "kl"), ("grad_norm", "grad norm"))
    for name, title in shown:
        if f"train/{name}" in last_step:
            value = last_step[f"train/{name}"]
            words.append(f"{title} {0.0 if abs(value) < ROUNDING else value:.4g}")
        elif name == "loss" and last_step:
            words.append("loss -")  # no token of the step counts
    generated = "perf/data_time" not in row
    phases = [("rollout", "generate" if generated else "data"), ("train", "train")]
    phases += [("update_weights", "sync")] if generated else []
    spent = " ".join(f"{title} {duration(row.get(f'perf/{name}_time', 0.0))}" for name, title in phases)
    moved = row.get("perf/sleep_time", 0.0) + row.get("perf/wake_up_time", 0.0)
    words.append(f"{spent} ({duration(moved)} of these handing memory over)" if moved else spent)
    return "  ".join(words)


def untrained_words(batch: ReadyRollout) -> list[str]:
    """How many samples train nothing, and why, in brackets; advantages of 0 alone only where nothing else is left."""
    reasons, total = batch.untrained, sum(batch.untrained.values())
    nothing = total == batch.num_samples > 0
    counts = ", ".join(f"{count} {why}" for why, count in reasons.items() if nothing or why != NO_ADVANTAGE)
    if not counts:
        return []
    return [f"({'nothing to train on' if nothing else 'not trained on'}: of {batch.num_samples} samples {counts})"]


def drift_problem(rollout_id: int, steps: Sequence[Mapping[str, float]], most: float | None) -> str | None:
    """An error line if log-probs of trainer and engine are further apart than allowed in a step of a rollout."""
    found = [metrics[DRIFT] for metrics in steps if DRIFT in metrics]
    if most is None or all(value <= most for value in found):
        return None
    worst = max(found, key=lambda value: math.inf if math.isnan(value) else value)
    return (
        f"step {rollout_id + 1}: the trainer's log-probs are {worst:.3g} nats from the engine's in the mean, and "
        f"--max-logprob-drift allows {most:g}; stale tokens, another precision and weights that arrived wrong move "
        "them apart: docs/explanation/exactness.md says by how much, or give a larger limit"
    )


def step_cells(number: int, num_rollout: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The cells of the last rollout in the tracker's ``rows`` for the console's table, as far as there are any.

    ``idle`` is the share of the step in which the trainers do not train; ``stale`` how many weight versions the samples
    lag behind, on average.
    """
    rollout: Mapping[str, Any] = next((row for row in reversed(rows) if row["kind"] == "rollout"), {})
    last_step: Mapping[str, Any] = next((row for row in reversed(rows) if row["kind"] == "train"), {})
    if last_step.get("rollout_id") != rollout.get("rollout_id"):
        last_step = {}
    shown = (
        ("reward", rollout, ("rollout/raw_reward",), "{:.3f}"),
        ("loss", last_step, ("train/loss",), "{:.4f}"),
        ("KL", last_step, ("train/kl_loss", "train/ppo_kl"), "{:.4f}"),
        ("length", rollout, ("rollout/response_len/mean",), "{:.0f}"),
        ("tokens/s", rollout, ("perf/tokens_per_second",), "{:.0f}"),
        ("idle", rollout, ("perf/wait_time_ratio",), "{:.0%}"),
        ("stale", rollout, ("rollout/staleness/mean",), "{:.1f}"),
        ("step s", rollout, ("perf/step_time",), "{:.1f}"),
    )
    cells = {"step": f"{number}/{num_rollout}"}
    for title, row, names, form in shown:
        value = next((row[name] for name in names if row.get(name) is not None), None)
        if value is not None:
            cells[title] = form.format(0.0 if abs(value) < ROUNDING else value)
        elif title == "loss" and last_step:
            cells[title] = "-"
    return cells | {"time left": time_left(rows, number, num_rollout)}


def time_left(rows: Sequence[Mapping[str, Any]], number: int, num_rollout: int) -> str:
    """Hours, minutes and seconds until the last rollout, by the last ten with their evaluations; without saves."""
    first = max(number - RECENT, 0)
    rollouts = [row for row in rows if row["kind"] == "rollout" and row["rollout_id"] >= first]
    evaluations = [row for row in rows if row["kind"] == "eval" and row["rollout_id"] > first]
    spent = sum(row["perf/step_time"] for row in rollouts) + sum(row.get("perf/eval_time", 0.0) for row in evaluations)
    left = round(spent / max(len(rollouts), 1) * (num_rollout - number))
    return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
