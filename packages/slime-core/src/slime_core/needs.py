"""What a flag needs to have an effect, as data beside its definition, and the one rule that follows from it.

A row is the ``needs`` of a :func:`slime_core.flags.flag`: ``needs=given("use_kl_loss")``; several must all hold, and
``given("a") | given("b")`` is any one of them. A flag that was given without what it needs has no effect, and so has a
flag that needs that flag. It is refused; if its value asks for nothing, or what it asks for is so anyway, it is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.flags import FlagSpec

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
        return f"{'not with' if self.is_without else 'needs'} {_either(self.flags)}"


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
"""The kinds of runs. What samples need not generate them: they may be recorded."""


def as_needs(needs: Need | Iterable[Need] | None) -> tuple[Need, ...] | None:
    """One need or several, as several; ``None`` where nothing was said."""
    return (needs,) if isinstance(needs, Need) else None if needs is None else tuple(needs)


def asks(spec: FlagSpec, value: Any) -> bool:
    """Whether a flag's value asks for something: it is neither 0, nor empty, nor the default."""
    value = tuple(value) if isinstance(value, list) else value
    return bool(value) and value != spec.default


def shown_needs(spec: FlagSpec, specs: Mapping[str, FlagSpec]) -> list[str]:
    """What a flag needs besides the defaults of others, for help."""
    defaults = {dest: other.default for dest, other in specs.items()}
    needs = [
        need
        for need in spec.needs or ()
        if need.kind is None and not any(_holds(one, specs, defaults, ()) for one in need.any_of)
    ]
    return [str(need) for need in needs]


def missing_need(
    spec: FlagSpec, specs: Mapping[str, FlagSpec], values: Mapping[str, Any], missing: Collection[str] = ()
) -> Need | None:
    """What a flag has no effect without; ``None`` if it has one.

    Args:
        spec: The flag.
        specs: All flags, by name in Python.
        values: Their values. A condition on a flag that is not among them holds.
        missing: The names of kinds that the run is not of.
    """
    for need in spec.needs or ():
        met = [one for one in need.any_of if _holds(one, specs, values, missing)]
        if not met:
            return need
        needed = [specs[one.dest] for one in met if isinstance(one, Condition) and one.dest in specs]
        if len(needed) == len(met) and not need.is_without:
            roots = [missing_need(other, specs, values, missing) for other in needed]
            if None not in roots:
                return roots[0]
    return None


def _holds(one: Condition | Kind, specs: Mapping[str, FlagSpec], values: Mapping[str, Any], missing: Any) -> bool:
    if isinstance(one, Kind):
        return one.name not in missing
    if one.dest not in values or one.dest not in specs:
        return True
    value = values[one.dest]
    return one.absent != (value in one.values if one.values else asks(specs[one.dest], value))


def without_effect(
    specs: Mapping[str, FlagSpec], values: Mapping[str, Any], among: Iterable[str], missing: Collection[str] = ()
) -> dict[Need, list[FlagSpec]]:
    """The flags ``among`` some that have no effect, by what is missing. The others are as of :func:`missing_need`."""
    found: dict[Need, list[FlagSpec]] = {}
    for dest in among:
        if dest in specs and (need := missing_need(specs[dest], specs, values, missing)) is not None:
            found.setdefault(need, []).append(specs[dest])
    return found


def refusals(specs: Mapping[str, FlagSpec], values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with values of which nobody knows which were given: those that ask for something are taken for it.

    Kinds of runs are not known either, and hold.
    """
    asked = [dest for dest, spec in specs.items() if not spec.harmless and asks(spec, values[dest])]
    for need, idle in without_effect(specs, values, asked).items():
        yield refusal(need, idle, values)


def refusal(need: Need, idle: Iterable[FlagSpec], values: Mapping[str, Any], because: str = "") -> str:
    """The line that refuses flags without what they need; ``because`` of which flag a kind of run is not there."""
    named = [f"{spec.name}{_shown(values.get(spec.dest))}" for spec in idle]
    has, it = ("has", "it") if len(named) == 1 else ("have", "them")
    return f"{', '.join(named)} {has} no effect{_reason(need, values, because)}{_advice(need, it)}"


def note(need: Need, idle: Iterable[FlagSpec], values: Mapping[str, Any]) -> str:
    """The line that names flags which have no effect, where nothing is lost by that."""
    return f"no effect{_reason(need, values)}: {', '.join(spec.name for spec in idle)}"


def _reason(need: Need, values: Mapping[str, Any], because: str = "") -> str:
    if need.kind is not None:
        return f", as {need.kind.missing}{f' with {because}' if because else ''}"
    if need.is_without:
        return f" with {_either(need.flags)}"
    first = need.flags[0]
    if len(need.flags) == 1 and first.values and (current := _shown(values.get(first.dest))):
        return f" with {Condition(first.dest)}{current}"
    return f" without {_either(need.flags)}"


def _either(conditions: Sequence[Condition]) -> str:
    """``--a, --b or --c``; of many the first ones."""
    named = [str(one) for one in conditions]
    if len(named) > MOST_NAMED:
        named = [*named[: MOST_NAMED - 1], f"one of {len(named) - MOST_NAMED + 1} others"]
    comma = "," if any(len(one.values) > 1 for one in conditions) else ""
    return f"{comma} or ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)


def _advice(need: Need, it: str) -> str:
    if need.kind is not None:
        return f"; leave {it} out"
    if need.is_without:
        return "; leave one of them out"
    if len(need.flags) > 1:
        return f"; add one of these, or leave {it} out"
    return f"; give {need.flags[0]}, or leave {it} out"


def _shown(value: Any) -> str:
    """A value behind its flag."""
    if value is None or isinstance(value, bool):
        return ""
    return f" {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"
