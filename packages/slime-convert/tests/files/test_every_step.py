"""Outputs that are stopped at every step of what makes, continues, renames and removes them."""

import errno
import fcntl
import os
import shutil
import sys
from contextlib import contextmanager, suppress

import pytest

from slime_convert.errors import OutputError, UnfinishedError
from slime_convert.files import output, partial
from slime_convert.files.output import MANIFEST, new_directory
from slime_convert.files.partial import Conversion, refuse_unfinished

NEW = {"model": "new", "below/more": "new"}
EARLIER = {"model": "earlier", "below/more": "earlier"}


def write(out, *, force=True, text="new", stop=False):
    with new_directory(out, Conversion("test", (), {"text": text}), force=force) as unfinished:
        for name in NEW:
            unfinished.write(name, text.encode())
        if stop:
            raise KeyboardInterrupt


def files_of(root):
    """Texts of the files below a directory, and its empty directories; without the list of files."""
    return {
        str(path.relative_to(root)): path.read_text() if path.is_file() else None
        for path in root.rglob("*")
        if (path.is_file() or not any(path.iterdir())) and path.name != MANIFEST
    }


def nothing(out):
    pass


def empty(out):
    out.mkdir()


def earlier(out):
    write(out, text="earlier")


def another(out):
    """An earlier output, and another conversion that was interrupted."""
    earlier(out)
    with pytest.raises(KeyboardInterrupt):
        write(out, text="another", stop=True)


def between(out):
    """As a kill between the two renamings of ``--force`` leaves it."""
    earlier(out)
    with pytest.raises(KeyboardInterrupt):
        write(out, stop=True)
    out.rename(out.with_name(".out.partial") / "earlier")


BEFORE = [another, *(pytest.param(before, marks=pytest.mark.full) for before in (nothing, empty, earlier, between))]
OURS = {output.__file__, partial.__file__}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Without what takes long and leaves no trace that could be seen here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for module in (output, partial):
        monkeypatch.setattr(module, "version", lambda: None)


@contextmanager
def at_every_line(call):
    """Call a function before every line that is run of our files."""

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def check(place, had, *, whole_output):
    """What may be left, and that the next run tidies up.

    Args:
        place: Directory of the output.
        had: The earlier output.
        whole_output: Whether there must be an output by its name if there was one earlier.
    """
    out, left = place / "out", place / ".out.partial"
    for made in place.glob(".slime-convert-*"):  # of a process that was killed while it began
        shutil.rmtree(made)
    found = files_of(out) if out.exists() else {}
    assert found in ({}, had, NEW)
    if had and found == {}:
        assert not whole_output and files_of(left / "earlier") == had
    if (left / "output").exists() and (left / "lock").exists():
        with pytest.raises(UnfinishedError):
            refuse_unfinished(left / "output")
    if had or found:
        copy = shutil.copytree(place, place.with_name("copy"))
        with pytest.raises(OutputError, match="exists already"):
            write(copy / "out", force=False)
        assert files_of(copy / "out") == (found or had)
        shutil.rmtree(copy)
    write(out)
    assert files_of(out) == NEW and [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("before", BEFORE)
def test_killed_at_any_step(tmp_path, before):
    """Each state of the disk is copied, as a kill would leave it."""
    place, states = tmp_path / "place", []
    place.mkdir()
    before(place / "out")
    had = {} if before in (nothing, empty) else EARLIER

    def look():
        now = files_of(place)
        if not states or now != states[-1]:
            states.append(now)
            shutil.copytree(place, tmp_path / str(len(states)))

    with at_every_line(look):
        write(place / "out")
    assert len(states) > 10
    for number in range(1, len(states) + 1):
        check(tmp_path / str(number), had, whole_output=False)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.full)])
def test_interrupted_before_any_line(tmp_path, monkeypatch, before, step):
    """Before every fourth, where it must be quick."""
    flock, locks = fcntl.flock, []
    monkeypatch.setattr(fcntl, "flock", lambda lock, how: locks.append(lock) or flock(lock, how))
    had = {} if before in (nothing, empty) else EARLIER
    number, ended = 0, False
    while not ended:
        place, left = tmp_path / str(number), [number]
        place.mkdir()
        before(place / "out")
        locks.clear()

        def interrupt(left=left):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt), at_every_line(interrupt):
            write(place / "out")
            ended = True
        for lock in locks:  # an interrupted process ends, and with it its locks
            with suppress(OSError):
                os.close(lock)
        check(place, had, whole_output=before is not between)
        number += step
    assert number > 50


CALLS = ("mkdir", "open", "rename", "fsync", "unlink", "rmdir", "stat", "scandir", "listdir", "chmod")


@pytest.mark.parametrize("before", BEFORE)
def test_an_error_of_any_call_of_the_system_is_ours(tmp_path, before):
    """Every message is ours, and the earlier output is in its place whatever fails."""
    had = {} if before in (nothing, empty) else EARLIER
    number, failed = 0, True
    while failed:
        place, left = tmp_path / str(number), [number]
        place.mkdir()
        before(place / "out")
        failed = False

        def failing(call, left=left):
            def run(*args, **kwargs):
                nonlocal failed
                left[0] -= 1
                if left[0] == -1:
                    failed = True
                    raise OSError(errno.EIO, "Input/output error")
                return call(*args, **kwargs)

            return run

        with pytest.MonkeyPatch.context() as patch, suppress(OutputError):
            for name in CALLS:
                patch.setattr(os, name, failing(getattr(os, name)))
            write(place / "out")
        check(place, had, whole_output=before is not between)
        number += 1
    assert number > 50
