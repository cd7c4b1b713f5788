"""Text for people: how far a conversion is, what it wrote, tables."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all: first with what an earlier run left, then as bytes are written."""

_LONGEST = 10_000  # characters of a line
_LOG_SECONDS, _LOG_PERCENT, _LOG_PAUSE_SECONDS = 60.0, 5, 2.0


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        num_bytes: Bytes of the weights.
        copied: Names of the weights that were copied from the original model because the checkpoint lacks them.
        notes: What else a user should know, one sentence each.
    """

    path: Path
    num_weights: int
    num_bytes: int
    seconds: float
    copied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """One line."""
        rate = f", {size_text(int(self.num_bytes / self.seconds))}/s" if self.seconds > 0 else ""
        weights = f"{self.num_weights:,} weight{'s' * (self.num_weights != 1)}"
        path = printable(str(self.path))
        return f"wrote {weights}, {size_text(self.num_bytes)}, in {self.seconds:.1f} s{rate}: {path}"


class ProgressBar:
    """A bar by tqdm: in a notebook a widget, on a terminal a line.

    Bytes that the first call reports as done are from an earlier run and do not count for the rate.

    Args:
        options: Further options of ``tqdm.auto.tqdm``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._bar: Any = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """As :data:`OnProgress`."""
        with suppress(OSError):  # of a terminal that is gone; nobody looks, and the conversion goes on
            if self._bar is None:
                from tqdm.auto import tqdm

                sizes = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "dynamic_ncols": True}
                self._bar = tqdm(total=total_bytes, initial=done_bytes, **sizes, **self._options)
            self._bar.update(done_bytes - self._bar.n)
            if done_bytes == total_bytes:
                self._bar.leave = True
                self._bar.close()


@dataclass
class ProgressLines:
    """For logs: passes a line to ``write`` every 5 %, but not within two seconds of the last, and every minute."""

    write: Callable[[str], Any]
    _begun: float = field(default_factory=time.monotonic)
    _said: float = field(default_factory=time.monotonic)
    _percent: int = -1
    _first: int = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """As :data:`OnProgress`."""
        now, percent = time.monotonic(), 100 * done_bytes // max(total_bytes, 1)
        if self._percent < 0:
            self._percent, self._first = percent, done_bytes
            self._begun = self._said = now  # what came before, such as importing torch, says nothing of the rate
            if done_bytes and done_bytes < total_bytes:
                self.write(f"continuing: {size_text(done_bytes)} of {size_text(total_bytes)} are there already")
            return
        waited = now - self._said
        if waited < (_LOG_PAUSE_SECONDS if percent - self._percent >= _LOG_PERCENT else _LOG_SECONDS):
            return
        self._percent, self._said = percent, now
        rate = (done_bytes - self._first) / max(now - self._begun, 1e-9)
        left = f", {(total_bytes - done_bytes) / rate:.0f} s left" if rate and done_bytes < total_bytes else ""
        done, total, rate_text = map(size_text, (done_bytes, total_bytes, int(rate)))
        self.write(f"{percent:3d} %, {done} of {total}, {rate_text}/s{left}")


def command_progress(*, quiet: bool) -> OnProgress:
    """How a command shows its progress: a bar if stderr is a terminal, else lines; nothing if it is to be quiet."""
    if quiet or sys.stderr is None:  # a process may be started without stderr
        return no_progress
    # leave=False: an error's message takes the bar's line.
    bar = ProgressBar(position=0, leave=False, file=sys.stderr)
    return bar if sys.stderr.isatty() else ProgressLines(say)


def say(line: str) -> None:
    """Write a line to stderr, if there is one; where it takes none, only the line is lost."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")  # where the progress may stand
        text = printable(" ".join(line.split()))
        if len(text) > _LONGEST:  # a name in a file that is not one's own has any length
            text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
        sys.stderr.write(f"{text}\n")
    flush_or_drop(sys.stderr)


def flush_or_drop(stream: TextIO | None) -> None:
    """Write what is left, if it is taken: it would be tried again when the process ends, and change its exit code."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        drop(stream)


def drop(stream: TextIO | None) -> None:
    """Send a stream of this process, and what is left of it, nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def printable(text: str) -> str:
    """The text with escapes for what cannot be printed: the name of a weight may hold commands for the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def json_value(value: Any) -> Any:
    """A plain value for JSON, in which NaN and infinities become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


def size_text(nbytes: int) -> str:
    """Bytes with a binary unit, such as ``1.5 GiB``."""
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{nbytes} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as ``128×24``; a single number is ``scalar``."""
    return "×".join(map(str, shape)) or "scalar"


def aligned(rows: Sequence[Sequence[str]], numbers: range = range(0)) -> str:
    """Rows of cells in columns of equal width; the columns ``numbers`` are set to the right."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        shown = [printable(cell) for cell in cells]
        width = max(map(len, shown))
        columns.append([cell.rjust(width) if number in numbers else cell.ljust(width) for cell in shown])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))
