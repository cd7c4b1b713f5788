"""What a benchmark gives back.

A benchmark is a file `benchmarks/NAME.py` with a docstring, whose first line says what it measures, and a function

    def main(out: Path, *, quick: bool) -> list[Record]

`out` is an empty directory for whatever it writes; `quick` asks for the smallest run that still measures something. One
that has larger runs than are made by default takes `full: bool = False` as well, which asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One measured number.

    Attributes:
        case: What was measured, such as `trl`.
        metric: Which number of it, such as `train`.
        value: The number.
        unit: Its unit.
        more_is_better: Whether a larger value is better; `None` where neither is.
        goal: What the value should reach, or stay at or below where less is better; `None` without a goal.
    """

    case: str
    metric: str
    value: float
    unit: str
    more_is_better: bool | None = None
    goal: float | None = None
