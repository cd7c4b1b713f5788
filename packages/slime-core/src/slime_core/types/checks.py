"""Checks of a sample's fields. Numbers of other libraries become plain ones, which JSON can hold."""

from __future__ import annotations

import operator
from typing import Any

from slime_core.errors import DataError

# No float is larger, and Python prints it: integers of 4,300 digits and more it does not.
_MOST_BITS = 1024
_ZEROS_AND_ONES = frozenset((0, 1))
_SCALARS = {str, int, float, bool, type(None)}
# Python's own limit for JSON is near 1000 and depends on the caller; what was written must be readable anywhere.
_MOST_LEVELS = 100


def integer(where: str, name: str, value: Any, *, least: int | None = None) -> int:
    """The value as a plain integer. ``where`` says whose field it is, such as ``sample 7``, in all of these functions.

    Raises:
        DataError: It is not an integer, is below ``least``, or has more than 1,024 bits.
    """
    try:
        plain = value if type(value) is int else int(operator.index(value))
    except TypeError:
        raise DataError(f"{where}: {name} must be an integer, got {value!r} ({type(value).__name__})") from None
    if plain.bit_length() > _MOST_BITS:
        raise DataError(f"{where}: {name} is an integer of {plain.bit_length()} bits; at most {_MOST_BITS} are allowed")
    if least is not None and plain < least:
        raise DataError(f"{where}: {name} is {plain}; it must be {least} or more")
    return plain


def integers(where: str, name: str, values: Any, *, least: int) -> list[int]:
    """The values, a sequence or array of one dimension, as a list of plain integers; an error names the first wrong."""
    plain: list[int] = _as_list(where, name, values, "integers")
    if _all_are(int, plain) and (not plain or (least <= min(plain) and max(plain) < 2**63)):
        return plain
    return [integer(where, f"{name}[{place}]", value, least=least) for place, value in enumerate(plain)]


def numbers(where: str, name: str, values: Any) -> list[float]:
    """The same with plain floats; NaN and infinities are allowed."""
    plain: list[float] = _as_list(where, name, values, "numbers")
    if _all_are(float, plain):
        return plain
    return [_number(where, f"{name}[{place}]", value) for place, value in enumerate(plain)]


def mask(where: str, values: Any) -> list[int]:
    """The loss mask as plain zeros and ones."""
    entries = _as_list(where, "loss_mask", values, "zeros and ones")
    if _all_are(int, entries) and _ZEROS_AND_ONES.issuperset(entries):
        return entries
    if wrong := [value for value in entries if value not in (0, 1)]:
        raise DataError(f"{where}: loss_mask may hold 0 and 1 only, got {_distinct(entries, wrong)}")
    return [int(value) for value in entries]


def _all_are(kind: type, values: list[Any]) -> bool:
    """Whether all values are of this very type. Counting is the fastest way to see that of thousands of tokens."""
    return list(map(type, values)).count(kind) == len(values)


def _distinct(entries: list[Any], wrong: list[Any]) -> list[Any]:
    try:
        return sorted(set(entries))
    except TypeError:
        return wrong[:3]


def messages(where: str, name: str, value: Any) -> None:
    """Check that a value is text or chat messages."""
    if not isinstance(value, str | list):
        raise DataError(f"{where}: {name} must be a string or chat messages, got {type(value).__name__}")
    if isinstance(value, list):
        for place, message in enumerate(value):
            if not isinstance(message, dict):
                raise DataError(f"{where}: {name}[{place}] must be a message, got {message!r}; write a dictionary")


def reward(where: str, value: Any) -> float | dict[str, Any] | None:
    """The reward as plain values: a number, several parts by name, or ``None``.

    Other parts than numbers, such as the answer that was found, are carried; those that JSON cannot hold are left out.
    """
    if not isinstance(value, dict):
        return None if value is None else _plain_number(where, "reward", value)
    _check_names(where, "reward", value)
    parts = {key: part for key, item in value.items() if (part := reward_part(item)) is not NOT_PLAIN}
    return value if len(parts) == len(value) and all(parts[key] is value[key] for key in parts) else parts


NOT_PLAIN: Any = object()
"""In place of a part of a reward that JSON cannot hold."""


def reward_part(value: Any) -> Any:
    """A part of a reward as a plain number, or else as a plain value; :data:`NOT_PLAIN` if it is neither."""
    plain = scalar(value)
    try:
        return _plain_number("", "", plain)
    except Exception:  # `__float__` of a user's class may raise anything
        if isinstance(plain, int):  # too large
            return NOT_PLAIN
    try:
        return check_plain(plain, "")
    except DataError:
        return NOT_PLAIN


def scalar(value: Any) -> Any:
    """A number or a truth value of NumPy, torch or the like as Python's own; anything else as it is.

    Arrays of one value count as that value.
    """
    if not hasattr(value, "tolist"):
        return value
    plain = value.tolist()
    while isinstance(plain, list) and len(plain) == 1:
        (plain,) = plain
    return plain


def named_numbers(where: str, name: str, value: Any) -> dict[str, float]:
    """A dictionary of plain numbers by name; the same object if it is one already."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: {name} must be a dictionary, got {type(value).__name__}")
    _check_names(where, name, value)
    plain = {key: _plain_number(where, f"{name}[{key!r}]", item) for key, item in value.items()}
    return value if all(plain[key] is value[key] for key in plain) else plain


def json_default(value: Any) -> Any:
    """For the ``default`` of JSON encoders: numbers and arrays of NumPy, torch and the like as plain ones."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _check_names(where: str, name: str, value: dict[Any, Any]) -> None:
    if wrong := [key for key in value if not isinstance(key, str)]:
        raise DataError(f"{where}: {name} has the key {wrong[0]!r}; its numbers are named by strings")


def check_plain(value: Any, path: str) -> Any:
    """Check that a value survives JSON: ``None``, booleans, numbers, strings, lists, and dictionaries with string keys.

    Returns it with numbers and arrays of other libraries as plain numbers and lists; the same object if there are none.

    Raises:
        DataError: Naming the place, such as ``metadata.tools[2]``, and the type, for a tuple too, which JSON would turn
            into a list; or the value has more than 100 levels, as one that holds itself has.
    """
    return _check_plain(value, path, _MOST_LEVELS)


def _check_plain(value: Any, path: str, levels: int) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if not levels:
        raise DataError(f"{path} is nested too deeply (over {_MOST_LEVELS} levels), or holds itself; make it flatter")
    if isinstance(value, list):
        if set(map(type, value)) <= _SCALARS:  # long lists of numbers, such as token ids
            return value
        items = [_check_plain(item, f"{path}[{place}]", levels - 1) for place, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{path} has the key {wrong[0]!r} of type {type(wrong[0]).__name__}; keys must be strings")
        parts = {key: _check_plain(item, f"{path}.{key}", levels - 1) for key, item in value.items()}
        return value if all(parts[key] is item for key, item in value.items()) else parts
    if hasattr(value, "tolist"):  # of NumPy, torch and the like
        return _check_plain(value.tolist(), path, levels - 1)
    raise DataError(
        f"{path} is a {type(value).__name__}; allowed: None, bool, int, float, str, list, dict with string keys"
    )


def _plain_number(where: str, name: str, value: Any) -> float:
    """Plain integers stay what they are: as a float, a large one would be another number."""
    number = _number(where, name, value)
    return value if type(value) in (int, float, bool) else number


def _number(where: str, name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    except OverflowError:
        raise DataError(f"{where}: {name} must be a number that a float can hold; it is too large") from None
    raise DataError(f"{where}: {name} must be a number, got {value!r} ({type(value).__name__})")


def _as_list(where: str, name: str, values: Any, kind: str) -> list[Any]:
    if type(values) is list:
        return values
    try:
        if not isinstance(values, str | bytes | dict | set | frozenset):
            plain = values.tolist() if hasattr(values, "tolist") else list(values)
            if isinstance(plain, list):
                return plain
    except (TypeError, ValueError):
        pass
    raise DataError(f"{where}: {name} must be a list of {kind}, got {type(values).__name__}")
