"""What ends every wait: a signal that asks the run to stop, or a part of it that is gone."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable
from typing import NoReturn

from slime_launch.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watch:
    """Asked at every poll of every wait. Signals are only noted when they come, for raising inside Ray breaks it."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._checks: list[Callable[[], None]] = []

    def listen(self, *, at_once: bool) -> None:
        """Take SIGINT, SIGTERM and SIGHUP over, again if something else has done so meanwhile.

        Args:
            at_once: Leave the process when one comes, for nothing has to be stopped in order yet; else only note it.
        """
        for signum in SIGNALS:
            signal.signal(signum, leave if at_once else self._note)

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


def leave(signum: int, _frame: types.FrameType | None) -> NoReturn:
    """End this process with the exit code that a shell expects; the supervisor ends what it has started."""
    os.write(2, stopped_line(signum).encode())
    os._exit(128 + signum)


def stopped_line(signum: int) -> str:
    """What a stopped run says last."""
    return f"slime-launch: stopped by {signal.Signals(signum).name}; the same command goes on from --save\n"
