"""``slime-launch diff``: where two runs part, from what they have written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.files import naming_damage
from slime_core.types import RolloutColumns
from slime_core.types.arrays import Ragged
from slime_core.words import counted
from slime_launch.diff_sizes import fields_of, relative_gap, size_lines
from slime_launch.errors import FlagError, PreflightError
from slime_launch.step_sums import StepSums, read_pairs, read_sums
from slime_launch.switches import second_switches
from slime_launch.tracking import Row
from slime_launch.written_run import WrittenRun

USAGE = """\
usage: slime-launch diff RUN_A RUN_B

Say in which step, sample, token, metric and weight two runs part first, which settings differ, what is equal,
and whether rounding explains the rest. RUN is a run's --output-dir.

Exit codes: 0 settings and the steps that both have are equal; 1 one of them differs; 2 a run cannot be compared."""
PLACES = frozenset({"config", "output_dir", "save", "wandb_group", "wandb_run_id", "wandb_dir", "dump_details"})
"""Settings that say where a run is, not what it computes."""
MOST_SHOWN = 8  # weights, and packages and variables that one run alone has


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first difference between two runs: the rollout, and a description for the user."""

    rollout_id: int
    words: str


def diff(argv: Sequence[str]) -> int:
    """Compare two runs; the exit code.

    Raises:
        FlagError: There are not two.
        PreflightError: A directory holds no run that can be compared.
    """
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    if wrong := [word for word in argv if word.startswith("-")] or argv[2:]:
        raise FlagError(f"unexpected {wrong[0]!r}; diff needs two runs' --output-dir, such as runs/first runs/second")
    if len(argv) != 2:
        raise FlagError("diff needs two runs' --output-dir, such as runs/first runs/second")
    first, second = (WrittenRun(Path(word)) for word in argv)
    with naming_damage(f"{first.directory} or {second.directory}"):
        settings = [*settings_that_differ(first, second)]
        rollouts, parting = first_parting(first, second)
        for line in (*settings_lines(settings), *parting_lines(rollouts, parting, first, second)):
            print(line)
        for line in size_lines(first, second) if parting else ():
            print(line)
    return 0 if parting is None and not settings else 1


def settings_that_differ(first: WrittenRun, second: WrittenRun) -> Iterator[tuple[str, Any, Any]]:
    """Settings, packages and variables of the environment that differ: name, and both values; ``None`` where unset.

    Of two opposite switches the first is compared, which is written down as it is in effect.
    """
    marks = {"settings": "--", "packages": "", "engine_packages": "the engines' ", "environment": "$"}
    for part, mark in marks.items():
        one, other = first.resolved.get(part) or {}, second.resolved.get(part) or {}
        if part == "engine_packages" and not (one and other):
            continue  # a run without engines, such as a replay, has none
        names = one.keys() | other.keys()
        for name in sorted(names - PLACES - second_switches(names) if part == "settings" else names):
            values = [_value(found.get(name)) for found in (one, other)]
            if values[0] != values[1]:
                yield f"{mark}{name.replace('_', '-') if part == 'settings' else name}", values[0], values[1]


def first_parting(first: WrittenRun, second: WrittenRun) -> tuple[int, Parting | None]:
    """How many of the steps that both have are equal before one differs, and what differs there; ``None`` if none does.

    Raises:
        PreflightError: They have no step in common.
    """
    if next(read_pairs(first.directory, second.directory), None) is None:
        have = [f"{run.directory} has {_steps_of(run)}" for run in (first, second)]
        raise PreflightError(f"the runs have no step in common: {' and '.join(have)}")
    equal = 0
    for one, other in read_pairs(first.directory, second.directory):
        if (words := next(differences(one, other, first, second), None)) is not None:
            return equal, Parting(one.rollout_id, words)
        equal += 1
    return equal, None


def differences(one: StepSums, other: StepSums, first: WrittenRun, second: WrittenRun) -> Iterator[str]:
    """The differences in a rollout, in the order in which one follows from the other."""
    if one.line != other.line:
        yield from _in_samples(one, other, first, second)
    if one.shards != other.shards:
        if len(one.shards) != len(other.shards):
            yield _have(len(one.shards), len(other.shards), "data-parallel rank")
        ranks = [rank for rank, pair in enumerate(zip_longest(one.shards, other.shards)) if pair[0] != pair[1]]
        yield f"data-parallel rank {ranks[0]} trains on other samples, or in another order; the samples are the same"
    yield from _in_steps(first.steps.get(one.rollout_id, []), second.steps.get(one.rollout_id, []))
    if one.line != other.line or one.names != other.names:
        yield from _in_weights(one, other)


def _in_samples(one: StepSums, other: StepSums, first: WrittenRun, second: WrittenRun) -> Iterator[str]:
    if len(one.index) != len(other.index):
        yield _have(len(one.index), len(other.index), "sample")
        return
    if one.index != other.index:
        yield "the samples have other numbers, or another order"
    for name in fields_of(one, other):
        pair = one.field(name), other.field(name)
        if pair[0] is None or pair[1] is None:
            if pair[0] is not pair[1]:
                yield f"only one run has {name}"
            continue
        places = np.flatnonzero(pair[0] != pair[1])
        if len(places):
            place, total = int(places[0]), counted(len(one.index), "sample")
            found = _in_field(name, place, first.rollout(one.rollout_id), second.rollout(one.rollout_id))
            yield f"{name} differs in {len(places):,} of {total}, first in sample {one.index[place]}{found}"


def _have(one: int, other: int, noun: str) -> str:
    return f"the first run has {counted(one, noun)}, the second {other:,}"


def _in_field(name: str, place: int, first: RolloutColumns | None, second: RolloutColumns | None) -> str:
    """Where in a field of a sample, if the rollouts are still on disk."""
    if first is None or second is None:
        return "; --save and --keep-rollouts in both runs would name the token"
    columns = [one.samples.get(name) for one in (first, second)]
    rows = [row for column in columns if isinstance(column, Ragged) and (row := column.rows[place]) is not None]
    if len(rows) < 2:
        return ""
    shared = min(map(len, rows))
    apart = np.flatnonzero(rows[0][:shared] != rows[1][:shared])
    at = int(apart[0]) if len(apart) else shared
    if rows[0].dtype == np.uint8 and name != "loss_mask":
        texts = [row.tobytes()[max(at - 20, 0) : at + 40].decode(errors="replace") for row in rows]
        return f" from byte {at} on: …{texts[0]}… and …{texts[1]}…"
    values = [str(row[at]) if at < len(row) else "nothing" for row in rows]
    return f" from number {at} on: {values[0]} and {values[1]}"


def _in_steps(one: Sequence[Row], other: Sequence[Row]) -> Iterator[str]:
    if len(one) != len(other):
        yield _have(len(one), len(other), "optimizer step")
    for number, (row, its) in enumerate(zip(one, other, strict=False), start=1):
        for name in (name for name in (*row, *(its.keys() - row.keys())) if name.startswith("train/")):
            if relative_gap(row.get(name), its.get(name)):
                yield f"in optimizer step {number} {name} is {_metric(row, name)} and {_metric(its, name)}"


def _metric(row: Row, name: str) -> str:
    if name not in row:
        return "nothing"
    return "not finite" if row[name] is None else str(row[name])


def _in_weights(one: StepSums, other: StepSums) -> Iterator[str]:
    if one.names != other.names:
        yield "the models have other weights"
    elif one.weights.shape == other.weights.shape and len(one.weights):
        apart = np.flatnonzero((one.weights != other.weights).any(axis=1))
        if len(apart):
            named = ", ".join(one.names[place] for place in apart[:MOST_SHOWN]) + ", …" * (len(apart) > MOST_SHOWN)
            yield f"{len(apart)} of {len(one.names)} weights differ after it: {named}"
    elif one.weights.shape != other.weights.shape:
        yield "only one run has trained the weights"


def settings_lines(found: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    """A line for each difference between the runs' settings, packages and environment."""
    if not found:
        yield "settings, packages and environment are the same, but for where the runs are"
        return
    yield "these differ:"
    yield from value_lines(found, "{} and {}", ("first run", "second run"))


def value_lines(found: Sequence[tuple[str, Any, Any]], pair: str, sides: tuple[str, str]) -> Iterator[str]:
    """Each pair of values in a line; what one of the ``sides`` alone has in one line for each kind of it."""
    for name, one, other in found:
        if one is not None and other is not None:
            yield f"  {name}: {pair.format(one, other)}"
    for side, run in enumerate(sides):
        only = [(name, values[side]) for name, *values in found if values[1 - side] is None]
        for kind in ("-", "$", ""):
            words = [f"{name} {value}" for name, value in only if kind == (name[0] if name[0] in "-$" else "")]
            if words:
                shown = words if kind == "-" else words[:MOST_SHOWN]
                more = [f"{len(words) - len(shown)} more"] if len(shown) < len(words) else []
                yield f"  only in the {run}: {', '.join([*shown, *more])}"


def parting_lines(rollouts: int, parting: Parting | None, first: WrittenRun, second: WrittenRun) -> Iterator[str]:
    """Where the runs part, or that they do not."""
    if parting is not None:
        number = parting.rollout_id
        first_ones = f"{counted(rollouts, 'step')} {'is' if rollouts == 1 else 'are'} equal"
        yield f"{first_ones}; in step {number + 1} (rollout_id {number}) {parting.words}"
        return
    ends = [sum(1 for _ in read_sums(run.directory)) for run in (first, second)]
    weights = max((len(one.names) for one in read_sums(first.directory)), default=0)
    yield (
        f"equal: {counted(rollouts, 'step')} to the last bit, with all samples, what each rank trains on, the metrics "
        f"of every optimizer step, and {counted(weights, 'weight')} after each"
    )
    if ends[0] != ends[1]:
        yield f"the runs have {ends[0]} and {counted(ends[1], 'step')}; those that both have were compared"


def _steps_of(run: WrittenRun) -> str:
    numbers = [sums.rollout_id + 1 for sums in read_sums(run.directory)]
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def _value(entry: Any) -> Any:
    value = entry.get("value") if isinstance(entry, Mapping) else entry
    return None if value == [] else value
