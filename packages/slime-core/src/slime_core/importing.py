"""Importing large packages quickly."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import without collecting garbage: imports leave hardly any, and looking for it takes a fifth of their time.

    No later collection looks at what exists at the end of the block, so do not make anything large in it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
