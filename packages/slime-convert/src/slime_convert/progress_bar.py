"""A conversion's progress on a terminal: bytes, rate and time left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slime_convert.progress import OnProgress, no_progress

if TYPE_CHECKING:
    from tqdm import tqdm


def terminal_progress() -> OnProgress:
    """A bar on stderr if that is a terminal, else nothing."""
    # There is no stderr if the process was started without.
    return ProgressBar() if sys.stderr is not None and sys.stderr.isatty() else no_progress


class ProgressBar:
    """Draws a line anew after each weight.

    What the first call says to be done is from an earlier run: it counts as done, but not for the rate.
    """

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """As :data:`slime_convert.progress.OnProgress`."""
        if self._bar is None:
            self._bar = _bar(done_bytes, total_bytes)
        self._bar.update(done_bytes - self._bar.n)
        if done_bytes == total_bytes:
            self._bar.leave = True
            self._bar.close()


def _bar(done_bytes: int, total_bytes: int) -> tqdm[None]:
    from tqdm import tqdm

    return tqdm(
        total=total_bytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        position=0,
        leave=False,  # an error's message takes the line's place
        file=sys.stderr,
    )
