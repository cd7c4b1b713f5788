"""Which flags have an effect: the one rule for the needs of `slime_core.needs`, and the lines about those without."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from slime_core.flag_spec import FlagSpec
from slime_core.needs import Condition, Kind, Need, either


def asks(spec: FlagSpec, value: Any) -> bool:
    """Whether a flag's value asks for something: it is neither 0, nor empty, nor the default."""
    value = tuple(value) if isinstance(value, list) else value
    return bool(value) and value != spec.default


def shown_needs(spec: FlagSpec, specs: Mapping[str, FlagSpec]) -> list[str]:
    """A flag's needs that the defaults of other flags do not meet, for help."""
    needs = [need for need in spec.needs or () if need.kind is None]
    asked = {one.dest for need in needs for one in need.any_of if isinstance(one, Condition)}
    defaults = {dest: specs[dest].default for dest in asked if dest in specs}
    return [str(need) for need in needs if not any(_holds(one, specs, defaults, ()) for one in need.any_of)]


def missing_need(
    spec: FlagSpec, specs: Mapping[str, FlagSpec], values: Mapping[str, Any], missing: Collection[str] = ()
) -> Need | None:
    """The need that leaves a flag without effect; ``None`` if the flag has one.

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
    """Lines about flags without effect, where nobody knows which were given: a value that asks for something counts.

    Kinds of runs are not known either, and hold.
    """
    asked = [dest for dest, spec in specs.items() if not spec.harmless and asks(spec, values[dest])]
    for need, idle in without_effect(specs, values, asked).items():
        yield refusal(need, idle, values)


def refusal(need: Need, idle: Iterable[FlagSpec], values: Mapping[str, Any], because: str = "") -> str:
    """The line that refuses flags without what they need; ``because`` is the flag that makes it another kind of run."""
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
        return f" with {either(need.flags)}"
    first = need.flags[0]
    if len(need.flags) == 1 and first.values and (current := _shown(values.get(first.dest))):
        return f" with {Condition(first.dest)}{current}"
    return f" without {either(need.flags)}"


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
