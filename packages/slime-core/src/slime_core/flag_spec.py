"""One flag as data: its name, its values, and what it needs. `slime_core.flags` makes them of config dataclasses."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

from slime_core.needs import Need


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Which numbers a flag takes; every number must be finite. ``advice`` is for the error message."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    advice: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            least = f"{self.least:.12g}"
            return least if self.least == self.most else f"between {least} and {self.most:.12g}"
        if self.least is not None and self.below is None:
            return f"{self.least:.12g} or more"
        bounds = (("above", self.above), ("at least", self.least), ("below", self.below), ("at most", self.most))
        return " and ".join(f"{word} {bound:.12g}" for word, bound in bounds if bound is not None) or "any number"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """One command-line flag.

    Attributes:
        name: As typed, such as ``--rollout-batch-size``.
        dest: The field's name in its config dataclass.
        type: ``str``, ``int``, ``float`` or ``bool``; of the items if ``nargs`` is set.
        default: Value when the flag is absent; ``dataclasses.MISSING`` if it must be given.
        help: One line, without unit or default.
        unit: Unit of the value (``tokens``, ``seconds`` …), or an empty string.
        choices: Allowed values, or ``None``.
        nargs: ``None`` for a single value, ``"+"`` for several. A repeated flag then appends.
        metavar: Placeholder in the help text, or ``None``.
        range: Which numbers are allowed.
        may_change: Whether a run may be continued with another value: what the run is does not depend on it.
        bare: Value when the flag is given without one; ``None`` if it needs one.
        needs: What it has no effect without, all of it; ``()`` if it always has one, ``None`` where nobody said.
        harmless: Whether what it asks for is so anyway where it has no effect, so that this is said, not refused.
    """

    name: str
    dest: str
    type: type
    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] | None = None
    nargs: str | None = None
    metavar: str | None = None
    range: Range = Range()
    may_change: bool = False
    bare: str | None = None
    needs: tuple[Need, ...] | None = None
    harmless: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool and self.nargs is None

    def problem(self, value: Any) -> str | None:
        """An error message: the value, the allowed ones, and what to do; ``None`` if the value is valid."""
        for item in value if isinstance(value, tuple | list) and self.nargs else (value,):
            if item is None:
                continue
            if self.choices is None and not self._is_of_type(item):
                return self._wrong_type(item)
            if isinstance(item, bool) and self.choices is None:
                continue
            advice = f"; {self.range.advice}" if self.range.advice else ""
            if self.choices is not None and item not in self.choices:
                return f"{self.name} {item} is unknown; allowed: {', '.join(self.choices)}{advice}"
            if isinstance(item, int | float) and item not in self.range:
                finite = "" if math.isfinite(item) else "a finite number, "
                return f"{self.name} {item} must be {finite}{self.range}{advice}"
        return None

    def _is_of_type(self, item: Any) -> bool:
        """Whether a value, which Python may have given, is of the flag's type; True is not a number."""
        return isinstance(item, bool) == (self.type is bool) and isinstance(item, _PYTHON[self.type])

    def _wrong_type(self, item: Any) -> str:
        if callable(item) and self.type is str:
            return (
                f"{self.name} takes text, got the function {getattr(item, '__qualname__', item)}: other processes look "
                "it up, so give its path, pkg.mod:fn or file.py:fn"
            )
        return f"{self.name} takes {_CALLED[self.type]}, got {item!r} ({type(item).__name__})"


_PYTHON: Mapping[type, tuple[type, ...]] = {
    str: (str, os.PathLike),
    int: (numbers.Integral,),
    float: (numbers.Real,),
    bool: (bool,),
}
"""Python types of the values that a flag of each type takes."""
_CALLED = {str: "text", int: "a whole number", float: "a number", bool: "True or False"}
