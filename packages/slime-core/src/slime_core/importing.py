"""Importing large packages quickly."""

from __future__ import annotations

import contextlib
import gc
import sys
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


@contextlib.contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Import as if these packages were not installed, for what is imported can do without them.

    One that was imported before stays. After the block they can be imported as ever.
    """
    absent: dict[str, None] = {name: None for name in names if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]  # an import of what is `None` there is an ImportError
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
