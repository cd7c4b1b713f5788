"""Text from files on its way to a terminal. No torch here."""

from __future__ import annotations

import math
from typing import Any


def printable(text: str) -> str:
    """The text with escapes for what is no printable character: a file may name a weight with a terminal's commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def json_value(value: Any) -> Any:
    """A plain value as JSON can hold it: NaN and infinities, which JSON has no numbers for, become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value
