"""Numbers in messages for people: counts with their noun, and times."""

from __future__ import annotations

_LEAST_SECONDS = 0.05  # less would be shown as 0.0


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: ``1 step``, ``2,000 steps``; ``plural`` where an s behind the noun does not do."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """A time in the unit that one reads it in, never as 0.0 of it: ``4.2 s``, ``3.0 min``, ``12.5 h``, ``<0.1 s``."""
    if seconds == 0:
        return "0 s"
    if seconds < _LEAST_SECONDS:
        return "<0.1 s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
