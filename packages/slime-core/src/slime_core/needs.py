"""The needs of flags, as data beside their definitions, and the one rule that follows from them.

A row is the ``needs`` of a :func:`slime_core.flags.flag`: ``needs=given("use_kl_loss")``; several must all hold, and
``given("a") | given("b")`` is any one of them. A flag that was given without what it needs has no effect, and so has a
flag that needs that flag. It is refused; if its value asks for nothing, or what it asks for is so anyway, it is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

MOST_NAMED = 4
"""Flags that a line names at most where one of many is needed."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """Another flag is given: with one of ``values``, or with any that asks for something. If ``absent``, it is not."""

    dest: str
    values: tuple[Any, ...] = ()
    absent: bool = False

    def __str__(self) -> str:
        values = f" {' or '.join(map(str, self.values))}" if self.values else ""
        return f"--{self.dest.replace('_', '-')}{values}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run, by its name; only who knows the whole run can say whether it is one. ``missing`` is how one is
    not: ``nothing is generated``."""

    name: str
    missing: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Need:
    """Any one of some conditions."""

    any_of: tuple[Condition | Kind, ...]

    def __or__(self, other: Need) -> Need:
        return Need(self.any_of + other.any_of)

    @property
    def kind(self) -> Kind | None:
        """The kind of run that is needed, if it is one."""
        return next((one for one in self.any_of if isinstance(one, Kind)), None)

    @property
    def flags(self) -> tuple[Condition, ...]:
        """The flags that are needed; those that must not be given where there are such."""
        found = tuple(one for one in self.any_of if isinstance(one, Condition))
        return tuple(one for one in found if one.absent) or found

    @property
    def is_without(self) -> bool:
        """Whether other flags must not be given."""
        return any(one.absent for one in self.flags)

    def __str__(self) -> str:
        """For help: ``needs --use-kl-loss``."""
        return f"{'not with' if self.is_without else 'needs'} {either(self.flags)}"


def either(conditions: Sequence[Condition]) -> str:
    """``--a, --b or --c``; of many the first ones."""
    named = [str(one) for one in conditions]
    if len(named) > MOST_NAMED:
        named = [*named[: MOST_NAMED - 1], f"one of {len(named) - MOST_NAMED + 1} others"]
    comma = "," if any(len(one.values) > 1 for one in conditions) else ""
    return f"{comma} or ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)


def given(dest: str, *values: Any) -> Need:
    """A flag, by its name in Python, that is given; with one of ``values``, if there are any."""
    return Need((Condition(dest, values),))


def unless(dest: str, *values: Any) -> Need:
    """The opposite of :func:`given`."""
    return Need((Condition(dest, values, absent=True),))


def kind(name: str, missing: str) -> Need:
    """A kind of run."""
    return Need((Kind(name, missing),))


GENERATES = kind("generates", "nothing is generated")
SAMPLES = kind("samples", "rows of a data set are trained on as they are")
SCORES = kind("scores", "held-out prompts are not scored")
TRAINS = kind("trains", "nothing is trained")
LAGS = kind("lags", "all tokens are of the weights that train on them")
TRAINERS = kind("trainers", "there are no trainers")
UPDATES = kind("updates", "weights stay as they are")
ROLLOUTS = kind("rollouts", "the run only evaluates")
"""The kinds of runs. What samples need not generate them: they may be recorded."""


def as_needs(needs: Need | Iterable[Need] | None) -> tuple[Need, ...] | None:
    """One need or several, as several; ``None`` where nothing was said."""
    return (needs,) if isinstance(needs, Need) else None if needs is None else tuple(needs)
