"""How conversions say how far they are."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all: first with what an earlier run left, then after each weight."""


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Say nothing."""
