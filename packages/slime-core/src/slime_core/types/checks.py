"""Checks of a sample's fields. Numbers of other libraries become plain ones, which JSON can hold."""

from __future__ import annotations

import operator
from typing import Any

from slime_core.errors import DataError


def integer(where: str, name: str, value: Any) -> int:
    """The value as a plain integer.

    Args:
        where: Whose field it is, such as ``sample 7``.
        name: The field.
        value: Its value.

    Raises:
        DataError: It is no integer.
    """
    if type(value) is int:
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        raise DataError(f"{where}: {name} must be an integer, got {value!r} ({type(value).__name__})") from None


def integers(where: str, name: str, values: Any, *, least: int) -> list[int]:
    """The values as a list of plain integers.

    Args:
        where: Whose field it is, such as ``sample 7``.
        name: The field.
        values: A list, or any sequence or array of one dimension.
        least: The smallest allowed value.

    Raises:
        DataError: Naming the first entry that is no integer or too small.
    """
    plain: list[int] = _as_list(where, name, values, "integers")
    if not set(map(type, plain)) <= {int}:
        plain = [integer(where, f"{name}[{place}]", value) for place, value in enumerate(plain)]
    if plain and min(plain) < least:
        place = next(place for place, value in enumerate(plain) if value < least)
        raise DataError(f"{where}: {name}[{place}] is {plain[place]}; it must be {least} or more")
    return plain


def numbers(where: str, name: str, values: Any) -> list[float]:
    """The values as a list of plain floats; NaN and infinities are allowed.

    Args:
        where: Whose field it is, such as ``sample 7``.
        name: The field.
        values: A list, or any sequence or array of one dimension.

    Raises:
        DataError: Naming the first entry that is no number.
    """
    plain: list[float] = _as_list(where, name, values, "numbers")
    if set(map(type, plain)) <= {float}:
        return plain
    return [_number(where, f"{name}[{place}]", value) for place, value in enumerate(plain)]


def mask(where: str, values: Any) -> list[int]:
    """The loss mask as plain zeros and ones.

    Raises:
        DataError: It holds something else.
    """
    entries = _as_list(where, "loss_mask", values, "zeros and ones")
    if wrong := [value for value in entries if value not in (0, 1)]:
        raise DataError(f"{where}: loss_mask may hold 0 and 1 only, got {_distinct(entries, wrong)}")
    return entries if set(map(type, entries)) <= {int} else [int(value) for value in entries]


def _distinct(entries: list[Any], wrong: list[Any]) -> list[Any]:
    try:
        return sorted(set(entries))
    except TypeError:
        return wrong[:3]


def reward(where: str, value: Any) -> float | dict[str, float] | None:
    """The reward as plain values: a number, several by name, or ``None``.

    Raises:
        DataError: It is none of them.
    """
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{where}: reward has the key {wrong[0]!r}; rewards are named by strings")
        plain = {key: _plain_number(where, f"reward[{key!r}]", item) for key, item in value.items()}
        return value if all(plain[key] is value[key] for key in plain) else plain
    return None if value is None else _plain_number(where, "reward", value)


def _plain_number(where: str, name: str, value: Any) -> float:
    """Plain integers stay what they are: as a float, a large one would be another number."""
    return value if type(value) in (int, float, bool) else _number(where, name, value)


def _number(where: str, name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(f"{where}: {name} must be a number, got {value!r} ({type(value).__name__})")


def _as_list(where: str, name: str, values: Any, kind: str) -> list[Any]:
    if type(values) is list:
        return values
    try:
        if not isinstance(values, str | bytes | dict):
            plain = values.tolist() if hasattr(values, "tolist") else list(values)
            if isinstance(plain, list):
                return plain
    except (TypeError, ValueError):
        pass
    raise DataError(f"{where}: {name} must be a list of {kind}, got {type(values).__name__}")
