import io
import sys

import pytest
from tqdm import tqdm

from slime_convert.progress import no_progress
from slime_convert.progress_bar import ProgressBar, terminal_progress


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
    clock, bar = terminal(), terminal_progress()
    bar(0, 8 * 2**30)
    clock[0] += 2
    bar(2 * 2**30, 8 * 2**30)
    assert "25%" in shown() and "2.00G/8.00G" in shown() and "[00:02<00:06, 1.07GB/s]" in shown()


def test_what_an_earlier_run_left_does_not_count_for_the_rate(terminal):
    clock, bar = terminal(), terminal_progress()
    bar(6 * 2**30, 8 * 2**30)
    clock[0] += 2
    bar(7 * 2**30, 8 * 2**30)
    assert "7.00G/8.00G [00:02<00:02, 537MB/s]" in shown()


def test_the_line_stays_when_everything_is_done_and_goes_otherwise(terminal):
    terminal()
    whole, cut = ProgressBar(), ProgressBar()
    whole(1, 1)
    assert "100%" in shown() and shown().endswith("\n")
    cut(0, 2)
    cut._bar.close()
    assert not shown().strip()


def test_nothing_to_do_and_nothing_to_write_end_the_line_once(terminal):
    terminal()
    for total in (0, 5):
        bar = terminal_progress()
        bar(total, total)
        bar(total, total)  # as after a weight without elements
    assert sys.stderr.getvalue().count("\n") == 2 and "5.00/5.00" in shown()


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_nothing_is_drawn_into_a_file(monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert terminal_progress() is no_progress
