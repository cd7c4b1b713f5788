"""Terminal output: one line per step; on a terminal a table of the last steps, and a progress bar for every wait.

``NO_COLOR`` takes the colors away; a terminal that cannot move its cursor (``TERM=dumb``) gets lines.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from slime_core.files import open_to_append
from slime_core.types import Span

PLAIN_UPDATE_SECONDS = 20.0
QUIET_SECONDS = 1.0
TABLE_ROWS = 8

Cells = Mapping[str, str]
"""A step's texts in the table, by column."""


def step_table(steps: Iterable[Cells]) -> Table:
    """A row for each step, with the columns that any of them has."""
    rows = list(steps)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    return table


class _LiveSteps(Progress):
    """The last steps, above the bar of what is going on."""

    steps: Iterable[Cells] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.steps:
            yield step_table(self.steps)
        yield self.make_tasks_table(self.tasks)


class Wait:
    """A wait in progress. :meth:`update` may be called at any rate."""

    def __init__(self, what: str, progress: Progress, out: RunConsole) -> None:
        self.what = what
        self.started = time.monotonic()
        self._progress = progress
        self._task = progress.add_task(what, total=None, note="")
        self._out = out
        self._announced = self.started

    @property
    def seconds(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.started

    def update(
        self, note: str = "", *, done: int | None = None, total: int | None = None, silent: tuple[str, ...] = ()
    ) -> None:
        """Show how far it is: what happened last, units where they can be counted, servers that do not answer."""
        self._out.silent = silent
        self._progress.update(self._task, completed=done, total=total, note=note)
        self._out.on_progress(self.what, (note, done, total))
        if self._progress.disable and time.monotonic() - self._announced >= PLAIN_UPDATE_SECONDS:
            self._announced = time.monotonic()
            count = f"{done}/{total} " if done is not None and total else ""
            self._out.line(f"  {self.what} … {self.seconds:.0f} s {count}{note}".rstrip())


class RunConsole:
    """A run's output, to standard output unless a stream is given, and to a log file if one is.

    ``on_progress`` hears what is waited for, and how far that is; ``silent`` are servers that do not answer meanwhile.
    ``spans`` are the waits that were of a phase of the loop.
    """

    def __init__(self, stream: TextIO | None = None, log_path: Path | None = None) -> None:
        self._rich = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._is_live = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._log = open_to_append(log_path) if log_path is not None else None
        self.on_progress: Callable[[str, Any], None] = lambda what, marker: None
        self.silent: tuple[str, ...] = ()
        self.spans: list[Span] = []
        self._steps: deque[Cells] = deque(maxlen=TABLE_ROWS)

    def step(self, text: str, cells: Cells) -> None:
        """Show a step: on a terminal as a row of the table, which stands there while something goes on; else a line."""
        if not self._is_live:
            self.line(text)
            return
        self._steps.append(cells)
        self._to_log(text)

    def line(self, text: str = "") -> None:
        """Print one line as it is."""
        self._rich.print(text, markup=False)
        self._to_log(text)

    def _to_log(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()

    @contextlib.contextmanager
    def wait(
        self, what: str, *, done: str | None = None, phase: str | None = None, within: Wait | None = None
    ) -> Iterator[Wait]:
        """Show that something is going on until the block ends; if it took more than a second, end with ``done``.

        With ``phase`` it is one of the loop's, and becomes one of the ``spans``. A part of another wait, which it is
        ``within``, shows nothing of its own.
        """
        if within is not None:
            yield within
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30))
        notes = (TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
        with _LiveSteps(
            *columns,
            *notes,
            console=self._rich,
            transient=True,
            refresh_per_second=5,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._is_live,
        ) as progress:
            progress.steps = self._steps
            wait = Wait(what, progress, self)
            self.silent = ()
            self.on_progress(what, None)
            yield wait
            self.on_progress(f"after: {what}", None)
        if phase is not None:
            self.spans.append(Span("loop", phase, time.time() - wait.seconds, wait.seconds))
        if done is not None and wait.seconds > QUIET_SECONDS:
            self.line(f"{done} ({wait.seconds:.1f} s)")

    def close(self) -> None:
        """Leave the table on the terminal, and close the log file."""
        if self._steps:
            self._rich.print(step_table(self._steps))
            self._steps.clear()
        if self._log is not None:
            self._log.close()
