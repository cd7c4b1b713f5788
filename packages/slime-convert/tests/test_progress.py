import io
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from slime_convert import Converted, ProgressBar, ProgressLines
from slime_convert.progress import aligned, command_progress, no_progress, say


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr a terminal, on which the clock is set by hand."""

    def make():
        now = [100.0]
        monkeypatch.setattr(tqdm, "monitor_interval", 0)
        monkeypatch.setattr("tqdm.std.time", lambda: now[0])
        monkeypatch.setattr(sys, "stderr", Terminal())
        return now

    return make


def shown():
    return sys.stderr.getvalue().split("\r")[-1]


def test_bytes_rate_and_time_left_are_shown(terminal):
    clock, bar = terminal(), command_progress(quiet=False)
    bar(0, 8 * 2**30)
    clock[0] += 2
    bar(2 * 2**30, 8 * 2**30)
    assert "25%" in shown() and "2.00G/8.00G" in shown() and "[00:02<00:06, 1.07GB/s]" in shown()


def test_what_an_earlier_run_left_does_not_count_for_the_rate(terminal):
    clock, bar = terminal(), command_progress(quiet=False)
    bar(6 * 2**30, 8 * 2**30)
    clock[0] += 2
    bar(7 * 2**30, 8 * 2**30)
    assert "7.00G/8.00G [00:02<00:02, 537MB/s]" in shown()


def test_the_line_stays_when_everything_is_done_and_goes_otherwise(terminal):
    terminal()
    whole, cut = (command_progress(quiet=False) for _ in range(2))
    whole(1, 1)
    assert "100%" in shown() and shown().endswith("\n")
    cut(0, 2)
    cut._bar.close()
    assert not shown().strip()


def test_nothing_to_do_and_nothing_to_write_end_the_line_once(terminal):
    terminal()
    for total in (0, 5):
        bar = command_progress(quiet=False)
        bar(total, total)
        bar(total, total)  # as after a weight without elements
    assert sys.stderr.getvalue().count("\n") == 2 and "5.00/5.00" in shown()


def test_nothing_is_shown_where_nobody_looks(terminal, monkeypatch):
    terminal()
    assert command_progress(quiet=True) is no_progress
    monkeypatch.setattr(sys, "stderr", None)
    assert command_progress(quiet=False) is no_progress
    say("to nobody")


def test_a_message_takes_the_place_of_the_bar(terminal):
    terminal()
    bar = command_progress(quiet=False)
    bar(0, 10)
    say("slime-convert: two\nlines with \x1b[2J")
    assert sys.stderr.getvalue().endswith("\r\x1b[Kslime-convert: two lines with \\x1b[2J\n")


@pytest.fixture
def lines(monkeypatch):
    """Lines for a log, and the clock."""
    now, found = [100.0], []
    monkeypatch.setattr("slime_convert.progress.time.monotonic", lambda: now[0])
    return now, found, ProgressLines(found.append, _begun=100.0, _said=100.0)


GIB = 2**30


def test_a_log_gets_a_line_every_five_percent(lines):
    clock, found, progress = lines
    for done in range(101):
        progress(done * GIB, 100 * GIB)
        clock[0] += 3
    assert len(found) == 20
    assert found[0] == "  5 %, 5.0 GiB of 100.0 GiB, 341.3 MiB/s, 285 s left"
    assert found[-1] == "100 %, 100.0 GiB of 100.0 GiB, 341.3 MiB/s"


def test_a_log_gets_a_line_every_minute(lines):
    """Of a conversion so large that 5 % take longer."""
    clock, found, progress = lines
    for done in range(600):
        progress(done, 10**6)
        clock[0] += 1
    assert len(found) == 9


def test_a_quick_conversion_says_nothing_between(lines):
    clock, found, progress = lines
    for done in range(101):
        progress(done, 100)
        clock[0] += 0.01
    assert found == []


def test_a_log_says_what_an_earlier_run_left(lines):
    clock, found, progress = lines
    progress(3 * GIB, 4 * GIB)
    clock[0] += 60
    progress(7 * GIB // 2, 4 * GIB)
    assert found[0] == "continuing: 3.0 GiB of 4.0 GiB are there already"
    assert found[1] == " 87 %, 3.5 GiB of 4.0 GiB, 8.5 MiB/s, 60 s left"


def test_what_came_before_the_first_bytes_does_not_count_for_the_rate(lines):
    """Importing torch takes seconds."""
    clock, found, progress = lines
    clock[0] += 30
    progress(0, 4 * GIB)
    clock[0] += 1
    progress(GIB, 4 * GIB)
    assert found == []  # too soon to say
    clock[0] += 1
    progress(2 * GIB, 4 * GIB)
    assert found == [" 50 %, 2.0 GiB of 4.0 GiB, 1.0 GiB/s, 2 s left"]


def test_a_bar_goes_on_when_its_terminal_is_gone():
    class Gone(Terminal):
        def write(self, _):
            raise OSError(5, "Input/output error")

    bar = ProgressBar(file=Gone())
    bar(0, 4)
    bar(2, 4)
    bar(4, 4)


def test_a_file_gets_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(command_progress(quiet=False), ProgressLines)


def test_a_bar_in_a_notebook_is_tqdms(monkeypatch):
    made = []

    class Widget(tqdm):
        def __init__(self, **options):
            made.append(options)
            super().__init__(**options)

    monkeypatch.setattr("tqdm.auto.tqdm", Widget)
    bar = ProgressBar(desc="Qwen3", file=io.StringIO())
    bar(1, 4)
    bar(4, 4)
    ((options),) = made
    assert (options["total"], options["initial"], options["desc"], options["unit"]) == (4, 1, "Qwen3", "B")


@pytest.mark.parametrize(
    ("num", "nbytes", "seconds", "line"),
    [
        (1, 12, 0.0, "wrote 1 weight, 12 bytes, in 0.0 s: /x"),
        (1234, 3 * GIB // 2, 2.0, "wrote 1,234 weights, 1.5 GiB, in 2.0 s, 768.0 MiB/s: /x"),
    ],
)
def test_the_line_at_the_end(num, nbytes, seconds, line):
    assert Converted(Path("/x"), num, nbytes, seconds).to_text() == line


def test_columns():
    rows = [("name", "n", "x"), ("a", "10", ""), ("long name", "9", "y\n")]
    assert aligned(rows, numbers=range(1, 2)) == "name        n  x\na          10\nlong name   9  y\\n"
