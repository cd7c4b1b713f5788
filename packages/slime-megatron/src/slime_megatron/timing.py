"""Wall time per phase."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Adds up wall time and computed tokens by phase.

    Args:
        synchronize: Waits until the device's queued work is done.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Time the block under ``name`` and count its ``tokens``."""
        start = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[name] += time.perf_counter() - start
        self.tokens[name] += tokens
