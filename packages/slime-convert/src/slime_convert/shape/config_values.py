"""Values of a ``config.json``, checked as they are read. ``null`` counts as left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_convert.errors import HfConfigError


def integer(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """An entry that must be an integer."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise HfConfigError(f"{key} is {value!r} in {where}; it must be an integer; use the model's original config")
    return value


def number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """An entry that must be a number."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HfConfigError(f"{key} is {value!r} in {where}; it must be a number; use the model's original config")
    return float(value)


def texts(config: Mapping[str, Any], key: str, where: str) -> list[str] | None:
    """An entry that must be a list of texts, if there is one."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
        raise HfConfigError(
            f"{key} is {value!r} in {where}; it must be a list of texts; use the model's original config"
        )
    return None if value is None else list(value)
