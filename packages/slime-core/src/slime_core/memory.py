"""Which part of its device memory a half of a run holds, for halves that take turns on the same devices."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from slime_core.errors import SlimeError


class MemoryStateError(SlimeError):
    """A call that does not fit what its half holds in device memory."""


class Held(enum.IntEnum):
    """The contents of a half's device memory; each value includes those before it."""

    NOTHING = 0
    WEIGHTS = 1
    EVERYTHING = 2

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Held.NOTHING: "nothing in device memory (asleep)",
    Held.WEIGHTS: "its weights alone in device memory (half asleep)",
    Held.EVERYTHING: "all of its device memory (awake)",
}


class MemoryState:
    """The device memory of one half, and the calls that may come now.

        EVERYTHING ── sleep(keep_weights=True) ─▶ WEIGHTS ── sleep() ─▶ NOTHING
        EVERYTHING ◀────────── wake() ─────────── WEIGHTS ◀── wake(weights_only=True) ── NOTHING

    ``sleep()`` also goes from EVERYTHING to NOTHING, and ``wake()`` back. A move that raises leaves a half that may not
    be used any more: nobody knows what it holds.
    """

    def __init__(self, half: str) -> None:
        self._half = half
        self._held: Held | None = Held.EVERYTHING

    @property
    def held(self) -> Held:
        """The contents of its device memory now.

        Raises:
            MemoryStateError: A move failed.
        """
        if self._held is None:
            raise MemoryStateError(f"{self._half} did not get through its last sleep or wake; start it again")
        return self._held

    def require(self, call: str, least: Held) -> None:
        """Check that ``call`` may come now, which needs ``least``; `MemoryStateError` if not, naming both."""
        if self.held < least:
            how = "wake()" if least is Held.EVERYTHING else "wake(weights_only=True)"
            raise MemoryStateError(f"{call} needs {least}, and {self._half} holds {self.held}; call {how} first")

    def sleeping(self, keep_weights: bool = False) -> contextlib.AbstractContextManager[None]:
        """A ``sleep``, which the block does; `MemoryStateError` if there is nothing to give back."""
        return self._moving("sleep", Held.WEIGHTS if keep_weights else Held.NOTHING, down=True)

    def waking(self, weights_only: bool = False) -> contextlib.AbstractContextManager[None]:
        """A ``wake``, which the block does; `MemoryStateError` if there is nothing to take."""
        return self._moving("wake", Held.WEIGHTS if weights_only else Held.EVERYTHING, down=False)

    @contextlib.contextmanager
    def _moving(self, call: str, to: Held, *, down: bool) -> Iterator[None]:
        if (to >= self.held) if down else (to <= self.held):
            raise MemoryStateError(f"{call} would leave {self._half} with {to}, and it holds {self.held} already")
        self._held = None
        yield
        self._held = to
