"""What ends every wait: a signal that asks the run to stop, or a part of it that is gone."""

from __future__ import annotations

import signal
import types
from collections.abc import Callable

from slime_launch.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watch:
    """Asked at every poll of every wait. Signals are only noted when they come, for raising inside Ray breaks it."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._checks: list[Callable[[], None]] = []

    def listen(self) -> None:
        """Note SIGINT, SIGTERM and SIGHUP from here on; to be called again after something else took them over."""
        for signum in SIGNALS:
            signal.signal(signum, self._note)

    def add(self, check: Callable[[], None]) -> None:
        """Also call ``check``, which raises if the part of the run that it looks at is gone."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise if the wait must end.

        Raises:
            Stopped: A signal has come.
            RunError: A part of the run is gone.
        """
        if self._signum is not None:
            raise Stopped(self._signum)
        for check in self._checks:
            check()

    def _note(self, signum: int, _frame: types.FrameType | None) -> None:
        if self._signum is None:
            self._signum = signum
