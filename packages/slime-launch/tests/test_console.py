import io
import os
import pty
import re
import threading
from collections.abc import Callable
from typing import TextIO

import pytest

from slime_launch.console import RunConsole


def test_plain_lines_go_to_the_stream_and_the_log(tmp_path):
    stream = io.StringIO()
    console = RunConsole(stream, tmp_path / "launch.log")
    console.line("step 1 [reward] 0.5")
    with console.wait("generate", done="generated") as wait:
        wait.update("note", done=1, total=2)
        wait.started -= 1.5
    console.close()
    assert stream.getvalue().splitlines()[0] == "step 1 [reward] 0.5"
    assert stream.getvalue().splitlines()[1].startswith("generated (1.5 s)")
    assert (tmp_path / "launch.log").read_text() == stream.getvalue()


def test_a_short_wait_says_nothing():
    stream = io.StringIO()
    with RunConsole(stream).wait("save", done="saved"):
        pass
    assert stream.getvalue() == ""


def test_a_long_wait_speaks_now_and_then():
    stream = io.StringIO()
    with RunConsole(stream).wait("train") as wait:
        wait.update("shard 1")
        wait.started -= 30
        wait._announced -= 30
        wait.update("shard 2", done=3, total=8)
        wait.update("shard 3")
    assert stream.getvalue().splitlines() == ["  train … 30 s 3/8 shard 2"]


CELLS = {"step": "1/2", "reward": "0.500", "KL": "0.0100", "time left": "0:00:07"}


def test_without_a_terminal_a_step_is_a_line(tmp_path):
    stream = io.StringIO()
    console = RunConsole(stream, tmp_path / "launch.log")
    console.step("step 1/2  reward 0.500", CELLS)
    with console.wait("train"):
        pass
    console.close()
    assert stream.getvalue() == "step 1/2  reward 0.500\n" == (tmp_path / "launch.log").read_text()


def on_terminal(use: Callable[[TextIO], None]) -> str:
    """What arrives at a terminal that is used so."""
    parent, child = pty.openpty()
    shown: list[bytes] = []

    def read():
        while True:
            try:
                got = os.read(parent, 65536)
            except OSError:  # Linux: the other end was closed
                return
            if not got:
                return
            shown.append(got)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(child, "w", encoding="utf-8") as terminal:
        use(terminal)
    reader.join(20)
    os.close(parent)
    return b"".join(shown).decode()


@pytest.fixture(autouse=True)
def colors(monkeypatch):
    """A terminal of usual size with colors, whatever the tests run in."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def one_step(terminal: TextIO) -> None:
    console = RunConsole(terminal)
    console.step("step 1/2  reward 0.500", CELLS)
    with console.wait("generate") as wait:
        wait.update("6 of 8", done=6, total=8)
    console.close()


def test_on_a_terminal_steps_are_a_live_table(tmp_path):
    def use(terminal):
        console = RunConsole(terminal, tmp_path / "launch.log")
        console.step("step 1/2  reward 0.500", CELLS)
        with console.wait("generate") as wait:
            wait.update("6 of 8", done=6, total=8)
            console.line("a line above it")
        console.step("step 2/2  reward 0.750", CELLS | {"step": "2/2", "reward": "0.750", "time left": "0:00:00"})
        console.close()

    written = on_terminal(use)
    text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", written)
    lines = [line.split() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    bar = next(i for i, line in enumerate(lines) if "generate" in line)
    assert lines[bar - 2] == ["step", "reward", "KL", "time", "left"]
    assert lines[bar - 1] == ["1/2", "0.500", "0.0100", "0:00:07"]
    assert "6 of 8" in text
    assert ["a", "line", "above", "it"] in lines
    assert "\x1b[2K" in written  # it is drawn again in its place
    assert lines[-2:] == [["1/2", "0.500", "0.0100", "0:00:07"], ["2/2", "0.750", "0.0100", "0:00:00"]]
    assert (tmp_path / "launch.log").read_text().count("step ") == 2


def colors_of(written: str) -> set[int]:
    """The SGR codes of foreground and background colors."""
    codes = {int(code) for found in re.findall("\x1b\\[([0-9;]+)m", written) for code in found.split(";")}
    return {code for code in codes if 30 <= code <= 49 or 90 <= code <= 107}


def test_no_color_takes_the_colors_and_leaves_the_table(monkeypatch):
    assert colors_of(on_terminal(one_step))
    monkeypatch.setenv("NO_COLOR", "1")
    written = on_terminal(one_step)
    assert not colors_of(written)
    assert "\x1b[2K" in written
    assert "6 of 8" in written


def test_a_terminal_that_cannot_move_its_cursor_has_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert on_terminal(one_step).splitlines() == ["step 1/2  reward 0.500"]
