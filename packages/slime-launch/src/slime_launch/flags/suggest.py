"""What a mistyped flag was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known flag closest to ``name``, or ``None`` if none is close.

    Args:
        name: As typed, such as ``--num-rolout``.
        known: The flags that exist.
    """
    if name.replace("_", "-") in known:
        return name.replace("_", "-")
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_flag(name: str, known: Collection[str]) -> str:
    """The line that tells somebody about a flag that does not exist."""
    guess = nearest(name, known)
    return f"unknown flag {name}; did you mean {guess}?" if guess else f"unknown flag {name}; see --help"
