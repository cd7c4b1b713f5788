"""Values of table columns as JSON has them, so that a row is the same row in every format."""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from typing import Any

from slime_core.errors import DataError


def plain_values(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """A table's row as a JSON object.

    Columns cannot tell an absent field from null, and give every object the fields of all: what is null, or NaN as
    pandas writes it, is left out. Dates become ISO text; decimals and UUIDs text.

    Raises:
        DataError: A field holds what JSON cannot.
    """
    return {key: _plain(f"{where}: {key!r}", value) for key, value in row.items() if not _is_null(value)}


def kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(where: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(where, item) for key, item in value.items() if not _is_null(item)}
    if isinstance(value, list | tuple):
        return [None if _is_null(item) else _plain(where, item) for item in value]
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    got = str(value) if isinstance(value, float) else f"a value of the type {type(value).__name__}"
    raise DataError(f"{where} holds {got}, which JSON cannot; leave the column out of the data set, or make it text")
