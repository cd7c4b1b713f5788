"""The parts of two runs that are equal, and by how much the others differ: the second half of ``slime-launch diff``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.types.arrays import Ragged
from slime_core.words import counted
from slime_launch.derived import CANARY_LIMITS
from slime_launch.step_sums import StepSums, read_pairs
from slime_launch.tracking import Row
from slime_launch.written_run import WrittenRun

# In the order in which one follows from the other; all other fields come after these.
FIELDS = (
    *("prompt", "label", "tokens", "response_length", "kept_tokens", "routed_experts", "rollout_log_probs"),
    *("weight_versions", "status", "reward", "remove_sample", "loss_mask", "teacher_log_probs"),
)
NUMBERS = "samples' numbers and order"
REAL = frozenset({"rollout_log_probs", "teacher_log_probs"})
"""Fields of a sample that are computed in floating point."""
RELATIVE = {"float32": 1e-3, "bfloat16": 0.1}
"""How far a metric of an optimizer step may be off by rounding, relative to 1 or its own size."""
NO_VALUE = 0xFFFFFFFF
"""The checksum where a sample has no value."""
BEYOND = math.inf
"""The size of a difference that is none of rounding, such as another token."""
UNKNOWN = math.nan
"""The size of a difference where only checksums are left."""


def fields_of(one: StepSums, other: StepSums) -> list[str]:
    """Names of the samples' fields in two rollouts, in that order."""
    return [*FIELDS, *sorted((one.fields | other.fields) - {*FIELDS})]


@dataclasses.dataclass
class ComparedPart:
    """One thing that is compared in every rollout.

    Attributes:
        unit: What there is one of it for each of, such as samples.
        limit: Differences up to this size are of rounding.
        total: How many were compared.
        differing: How many of them differ.
        largest: The largest difference; `BEYOND` and `UNKNOWN` are further values.
    """

    unit: str
    limit: float
    total: int = 0
    differing: int = 0
    largest: float = 0.0

    def add(self, total: int, sizes: Sequence[float]) -> ComparedPart:
        """Count ``total`` more; those that differ have ``sizes``. Returns itself."""
        self.total += total
        self.differing += len(sizes)
        for size in sizes:
            if self.largest != BEYOND and (math.isnan(size) or not size <= self.largest):
                self.largest = size
        return self


def size_lines(first: WrittenRun, second: WrittenRun) -> Iterator[str]:
    """What is equal in the rollouts that both runs have, what is not, and whether rounding explains where they part."""
    dtype = "bfloat16" if first.setting("bf16") else "float32"
    parts: dict[str, ComparedPart] = {}
    parting: dict[str, ComparedPart] = {}
    rollouts = 0
    for one, other in read_pairs(first.directory, second.directory):
        rollouts += 1
        found = dict(_compared(one, other, first, second, dtype))
        if not parting and any(part.differing for part in found.values()):
            parting = found
        for name, part in found.items():
            whole = parts.setdefault(name, ComparedPart(part.unit, part.limit))
            whole.add(part.total, [part.largest] * part.differing)
    for part in parts.values():
        if part.unit == "samples":  # also those of rollouts where neither run has the field
            part.total = parts[NUMBERS].total
    equal = [name for name, part in parts.items() if not part.differing]
    yield f"of the {counted(rollouts, 'step')} that both have"
    if equal:
        yield f"  equal: {', '.join(equal)}"
    for name, part in parts.items():
        if part.differing:
            by = f", by {part.largest:.1e} at most" if math.isfinite(part.largest) else ""
            yield f"  {name}: {part.differing} of {part.total} {part.unit} differ{by}"
    yield f"where they part, {_verdict(parting, dtype)}"


def _compared(
    one: StepSums, other: StepSums, first: WrittenRun, second: WrittenRun, dtype: str
) -> Iterator[tuple[str, ComparedPart]]:
    """Each part of one rollout. Samples are compared place by place; one that only one run has differs in all."""
    shared, total = sorted((len(one.index), len(other.index)))
    apart = sum(pair[0] != pair[1] for pair in zip_longest(one.index, other.index))
    yield NUMBERS, ComparedPart("samples", 0.0).add(total, [BEYOND] * apart)
    columns = None
    for name in fields_of(one, other):
        pair = one.field(name), other.field(name)
        if all(sums is None or (sums == NO_VALUE).all() for sums in pair):
            continue
        places = np.arange(shared)
        if pair[0] is not None and pair[1] is not None:
            places = np.flatnonzero(pair[0][:shared] != pair[1][:shared])
        if len(places) and name in REAL and columns is None:
            columns = first.rollout(one.rollout_id), second.rollout(one.rollout_id)
        sizes = [_size(name, int(place), columns) for place in places] + [BEYOND] * (total - shared)
        yield name, ComparedPart("samples", CANARY_LIMITS[dtype] if name in REAL else 0.0).add(total, sizes)
    differ = [pair[0] != pair[1] for pair in zip_longest(one.shards, other.shards)]
    yield "what each rank trains on", ComparedPart("shards", 0.0).add(len(differ), [BEYOND] * sum(differ))
    yield from _steps(first.steps.get(one.rollout_id, []), second.steps.get(one.rollout_id, []), dtype)
    yield from _weights(one, other)


def _weights(one: StepSums, other: StepSums) -> Iterator[tuple[str, ComparedPart]]:
    """Of each weight there is one checksum after each step; a weight that only one run has differs."""
    ours, theirs = (dict(zip(sums.names, sums.weights, strict=False)) for sums in (one, other))
    both = ours.keys() & theirs.keys()
    apart = sum(not np.array_equal(ours[name], theirs[name]) for name in both)
    sizes = [UNKNOWN] * apart + [BEYOND] * len(ours.keys() ^ theirs.keys())
    if total := len(ours.keys() | theirs.keys()):
        yield "weights", ComparedPart("checksums", 0.0).add(total, sizes)


def _size(name: str, place: int, columns: tuple[Any, Any] | None) -> float:
    """How far a field of a sample is apart, from the rollouts, if they are still there."""
    if name not in REAL:
        return BEYOND
    fields = [None if column is None else column.samples.get(name) for column in columns or ()]
    rows = [row for field in fields if isinstance(field, Ragged) and (row := field.rows[place]) is not None]
    if len(rows) < 2:
        return UNKNOWN
    return _distance(*rows) if len(rows[0]) == len(rows[1]) else BEYOND


def _distance(one: NDArray[Any], other: NDArray[Any]) -> float:
    apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(apart.max()) if np.isfinite(apart).all() else BEYOND


def _steps(one: Sequence[Row], other: Sequence[Row], dtype: str) -> Iterator[tuple[str, ComparedPart]]:
    names = {name: None for row in (*one, *other) for name in row if name.startswith("train/")}
    for name in names:
        sizes = [relative_gap((row or {}).get(name), (its or {}).get(name)) for row, its in zip_longest(one, other)]
        yield name, ComparedPart("optimizer steps", RELATIVE[dtype]).add(len(sizes), [size for size in sizes if size])


def relative_gap(one: Any, other: Any) -> float:
    """How far two values of a metric are apart, relative to 1 or the larger; 0 if they are the same."""
    if one == other or all(isinstance(value, float) and math.isnan(value) for value in (one, other)):
        return 0.0
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (one, other)):
        return BEYOND
    return float(abs(one - other) / max(1.0, abs(one), abs(other)))


def _verdict(parts: dict[str, ComparedPart], dtype: str) -> str:
    """Whether rounding explains the first rollout that differs."""
    differing = {name: part for name, part in parts.items() if part.differing}
    limit = f"{CANARY_LIMITS[dtype]:g} nats in {dtype}"
    if beyond := [name for name, part in differing.items() if part.largest > part.limit]:
        return f"it is more than rounding: {', '.join(beyond)}"
    if unknown := [name for name, part in differing.items() if math.isnan(part.largest) and name in REAL]:
        return (
            f"it may be rounding, which is up to {limit}: by how much {' and '.join(unknown)} differ is not known "
            "without --save and --keep-rollouts in both runs"
        )
    if not any(name in REAL or name.startswith("train/") for name in differing):
        return f"only checksums of {', '.join(differing)} differ, which do not say whether it is rounding"
    return f"rounding explains it, up to {limit}"
