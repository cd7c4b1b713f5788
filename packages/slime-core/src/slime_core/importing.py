"""Importing large packages quickly."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import without collecting garbage, of which that makes hardly any: it takes a fifth of the time.

    What there is at the end of the block is never looked at again, so nothing large belongs into it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
