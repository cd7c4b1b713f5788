"""Unfinished outputs: whose they are, what is kept of them, and their locks."""

import errno
import fcntl
import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

from slime_convert.cli import main
from slime_convert.errors import OutputError, UnfinishedError
from slime_convert.files.output import new_directory
from slime_convert.files.partial import Partial, refuse_unfinished
from slime_convert.formats import detect
from slime_convert.formats.hf import open_model
from support.family_models import tree
from support.outputs import NO_ROOM, conversion, names_in, write, write_half


class TestPartial:
    """Directories named ``.NAME.partial`` and ``.NAME.old`` were removed, whoever had made them."""

    @pytest.mark.parametrize("name", [".out.partial", ".out.old"])
    @pytest.mark.parametrize("kind", ["directory", "file", "link", "record"])
    @pytest.mark.parametrize("force", [False, True])
    def test_a_strangers_is_neither_used_nor_removed(self, tmp_path, name, kind, force):
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "photo").write_text("mine")
        if kind == "link":
            (tmp_path / name).symlink_to(mine)
        elif kind == "file":
            (tmp_path / name).write_text("mine")
        else:
            shutil.copytree(mine, tmp_path / name)
        if kind == "record":
            (tmp_path / name / "conversion.json").write_text("{}")
        before = tree(tmp_path)
        if name == ".out.partial":
            with pytest.raises(
                OutputError, match=r"\.out\.partial was not made by this version of slime-convert; move"
            ):
                write(tmp_path / "out", "new", force=force)
            assert tree(tmp_path) == before
        else:
            write(tmp_path / "out", "new", force=force)
            after = tree(tmp_path)
            assert before.items() <= after.items() and (tmp_path / "out" / "model").read_text() == "new"

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("name", ["photo", "config.json"])
    @pytest.mark.parametrize("kind", ["file", "link", "pipe"])
    def test_what_a_stranger_puts_into_ours_stays(self, tmp_path, name, kind):
        with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "out", conversion(), force=False) as partial:
            partial.write("model", b"half")
            raise KeyboardInterrupt
        photo, mine = tmp_path / ".out.partial" / "output" / name, tmp_path / "mine"
        mine.write_text("mine")
        if kind == "link":
            photo.symlink_to(mine)
        elif kind == "pipe":
            os.mkfifo(photo)
        else:
            photo.write_text("mine")
        before = tree(tmp_path)
        for what in (conversion(), conversion(other=True)):
            with (
                pytest.raises(OutputError, match=rf"output/{name} was not made by slime-convert; move it elsewhere"),
                new_directory(tmp_path / "out", what, force=False) as partial,
            ):
                partial.write("photo", b"new")
            assert tree(tmp_path) == before
        photo.unlink()
        write(tmp_path / "out", "new")

    @pytest.mark.parametrize("kind", ["link", "file"])
    def test_what_a_stranger_puts_into_ours_during_the_conversion_stays(self, tmp_path, kind):
        """Whether it has the name of a file that is created later, or another."""
        for number, name in enumerate(("photo", "model")):
            place, mine = tmp_path / str(number), tmp_path / "mine"
            mine.write_text("mine")
            with (
                pytest.raises(OutputError, match=rf"output/{name} was not made by slime-convert"),
                new_directory(place / "out", conversion(), force=False) as partial,
            ):
                if kind == "link":
                    (partial.output / name).symlink_to(mine)
                else:
                    (partial.output / name).write_text("mine")
                partial.write("model", b"new")
            assert mine.read_text() == (place / ".out.partial" / "output" / name).read_text() == "mine"


def changed_input(directory):
    (directory / "weights").write_bytes(b"longer")


def touched_input(directory):
    os.utime(directory / "weights", ns=(1, 1))


def further_input(directory):
    (directory / "more").touch()


@pytest.mark.parametrize("change", [changed_input, touched_input, further_input, None])
def test_another_conversion_begins_from_the_start_and_says_so(tmp_path, caplog, change):
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(b"short")
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM, conversion(source, shards=1))
    if change:
        change(source)
    now = conversion(source, shards=1 if change else 2)
    with new_directory(tmp_path / "out", now, force=False) as partial:
        assert not any(partial.output.iterdir())
        partial.write("model", b"new")
    (message,) = caplog.messages  # a warning, which goes to stderr unless the program says otherwise
    assert "another conversion" in message and "begins from the start" in message


def test_the_same_conversion_says_nothing(tmp_path, caplog):
    for _ in range(2):
        with pytest.raises(OutputError):
            write_half(tmp_path / "out", NO_ROOM)
    assert caplog.messages == []


def test_hidden_directories_are_not_inputs(tmp_path):
    (tmp_path / "source" / ".git").mkdir(parents=True)
    (tmp_path / "source" / ".metadata").touch()
    assert [Path(name).name for name in conversion(tmp_path / "source").record()["inputs"]] == [".metadata"]
    before = conversion(tmp_path / "source").record()
    (tmp_path / "source" / ".git" / "index").touch()
    assert conversion(tmp_path / "source").record() == before


def test_two_processes_do_not_write_one_output(tmp_path):
    with new_directory(tmp_path / "out", conversion(), force=False) as partial:
        with pytest.raises(OutputError, match=r"another process is writing .*/out; wait until it has ended"):
            write(tmp_path / "out", "second")
        write(tmp_path / "other", "second")
        partial.write("model", b"first")
    assert (tmp_path / "out" / "model").read_text() == "first"


def test_a_lock_that_is_removed_while_it_is_waited_for_is_made_again(tmp_path, monkeypatch):
    """The process that had it ended between our opening and our locking."""
    flock, place = fcntl.flock, tmp_path / ".out.partial"
    seen = []

    def slow(descriptor, how):
        if not seen:
            seen.append(True)
            shutil.rmtree(place)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with new_directory(tmp_path / "out", conversion(), force=False) as partial:
        assert (place / "lock").is_file()
        monkeypatch.undo()
        with pytest.raises(OutputError, match="another process is writing"):
            write(tmp_path / "out", "second")
        partial.write("model", b"first")


def test_the_one_that_ends_leaves_the_next_ones_directory_alone(tmp_path, monkeypatch):
    """The next process begins when the output is in its place, before the first gives its lock back."""
    close, following = Partial.close, []

    def slow(partial):
        monkeypatch.undo()
        following.append(Partial(tmp_path / "out", conversion().record()))
        close(partial)

    monkeypatch.setattr(Partial, "close", slow)
    write(tmp_path / "out", "new")
    with pytest.raises(OutputError, match=r"exists already|another process is writing"):
        write(tmp_path / "out", "third")
    assert following[0].output.is_dir()
    following[0].close()


def test_a_file_system_without_locks_is_written(tmp_path, monkeypatch, caplog):
    def none(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model").read_text() == "new"
    (message,) = caplog.messages
    assert "cannot be locked" in message and f"run no second conversion into {tmp_path / 'out'}" in message


READERS = {
    "inspect": lambda path: main(["inspect", str(path)]),
    "verify": lambda path: main(["verify", str(path), str(path)]),
    "hf-to-torch-dist": lambda path: main(["hf-to-torch-dist", "--hf-checkpoint", str(path), "--save", "x"]),
    "hf-to-fp8": lambda path: main(["hf-to-fp8", "--hf-checkpoint", str(path), "--save", "x"]),
    "merge-lora": lambda path: main(
        ["merge-lora", "--hf-checkpoint", str(path), "--adapter", str(path), "--save", "x"]
    ),
    "detect": detect,
    "open_model": open_model,
}


@pytest.mark.parametrize("reader", sorted(READERS))
@pytest.mark.parametrize("within", [".", "output", "output/release"])
def test_every_reader_refuses_an_unfinished_output_by_name(tmp_path, capsys, reader, within):
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM)
    path = tmp_path / ".out.partial" / within
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    try:
        assert READERS[reader](path) == 2
        message = capsys.readouterr().err
    except UnfinishedError as error:
        message = str(error)
    assert "is unfinished: a conversion into " in message and str(tmp_path / "out") in message


def test_another_version_begins_from_the_start(tmp_path, monkeypatch):
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    write(tmp_path / "out", "new")
    assert names_in(tmp_path / "out") == {"model"}


def test_a_directory_that_only_looks_unfinished_can_be_read(tmp_path):
    (tmp_path / ".x.partial").mkdir()
    refuse_unfinished(tmp_path / ".x.partial")
