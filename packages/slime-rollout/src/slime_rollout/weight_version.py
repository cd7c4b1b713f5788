"""What engines call their weights, besides the numbers of weight versions, and what requests call them."""

from __future__ import annotations

import uuid

INCOMPLETE = "incomplete"
"""The weights of an update that failed midway: nothing that is sampled from them counts."""

UNVERSIONED = "default"
"""SGLang's own word for the weights that it was started with."""


class CacheNamespace:
    """Keeps requests off the keys and values that earlier weights computed; for `EngineClient` to ask.

    With the pause mode ``in_place`` an engine whose requests are running keeps its cache of prefixes over an update.
    So requests of different weights get different namespaces in it, SGLang's ``extra_key``. What was computed in an
    earlier one is never met again, and leaves when its place is needed.

    Whoever sends weights calls :meth:`change` before and after: what is sent meanwhile may run on either weights. Only
    a request that is sent between an engine's going on and the second call, and shares a prefix with one that was sent
    after the first, can still meet the old weights' keys and values.

    Args:
        pause_mode: With ``retract`` engines forget the cache themselves, and there is one namespace.
    """

    def __init__(self, pause_mode: str) -> None:
        self._name = uuid.uuid4().hex if pause_mode == "in_place" else None  # engines may have served another run
        self._changes = 0

    def change(self) -> None:
        """The weights change from here on, or have changed. Called by one thread while others ask."""
        self._changes += 1

    def __call__(self) -> str | None:
        """The namespace of a request that is sent now; ``None`` is the one of requests that name none."""
        return None if self._name is None else f"{self._name}-{self._changes}"
