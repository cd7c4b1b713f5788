"""Where a worker's time goes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from slime_megatron.packing import PackedBatch


class PhaseTimer:
    """Adds up wall time and computed tokens by phase. ``synchronize`` waits for the device's queued work."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        start = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[name] += time.perf_counter() - start

    def counted(self, name: str, packed: PackedBatch) -> PackedBatch:
        """Count the batch's tokens under ``name``; returns the batch."""
        self.tokens[name] += packed.computed_tokens
        return packed
