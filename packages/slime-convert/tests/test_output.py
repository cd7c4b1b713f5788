import errno
import fcntl
import importlib.metadata
import os
import shutil
import stat
from pathlib import Path

import pytest

from slime_convert import output
from slime_convert.cli import main
from slime_convert.errors import CheckpointError, OutputError, UnfinishedError, WeightError
from slime_convert.formats import LEGACY, TORCH_DIST, detect
from slime_convert.hf import HfReader
from slime_convert.output import new_directory
from slime_convert.torch_dist import TorchDistReader
from slime_convert.unfinished import Conversion, Unfinished


def conversion(*inputs, **options):
    return Conversion("test", inputs, options)


def write(target, text, *, force=False, marker="model"):
    with new_directory(target, conversion(), force=force, marker=marker) as unfinished:
        (unfinished.output / "model").write_text(text)


def test_an_empty_directory_may_exist(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model").read_text() == "new"


def test_missing_parents_are_created(tmp_path):
    write(tmp_path / "a" / "b", "new")
    assert (tmp_path / "a" / "b" / "model").read_text() == "new"


def test_force_replaces_the_whole_of_an_earlier_output(tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "stale").touch()
    write(tmp_path / "out", "new", force=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_does_not_replace_anything_else(tmp_path):
    (tmp_path / "photos").touch()
    with pytest.raises(OutputError, match="is no earlier output"):
        write(tmp_path, "new", force=True)
    with pytest.raises(OutputError, match="is a file"):
        write(tmp_path / "photos", "new", force=True)
    assert (tmp_path / "photos").exists()


def test_outputs_are_as_readable_as_any_new_file(tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "out", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / "model").stat().st_mode) == 0o644


def test_an_unwritable_place_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*file/out.*choose a directory that you may write to"):
        write(tmp_path / "file" / "out", "new")


NO_ROOM = OSError(28, "No space left on device")


def write_half(target, error, what=None, *, force=False):
    """Begin, and stop with an error."""
    with new_directory(target, what or conversion(), force=force, marker="model") as unfinished:
        (unfinished.output / "half").touch()
        raise error


def names_in(directory):
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("error", [NO_ROOM, KeyboardInterrupt()])
def test_what_is_interrupted_is_kept_and_said(tmp_path, error):
    write(tmp_path / "out", "old")
    with pytest.raises((OutputError, KeyboardInterrupt)) as caught:
        write_half(tmp_path / "out", error, force=True)
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert f"run the same command again to continue, or delete {tmp_path / '.out.partial'}" in told
    assert (tmp_path / "out" / "model").read_text() == "old"
    assert names_in(tmp_path) == {"out", ".out.partial"}
    with new_directory(tmp_path / "out", conversion(), force=True, marker="model") as unfinished:
        assert names_in(unfinished.output) == {"half"}
        (unfinished.output / "model").write_text("new")
    assert names_in(tmp_path / "out") == {"half", "model"} and names_in(tmp_path) == {"out"}


def test_after_a_wrong_input_nothing_is_kept(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(WeightError):
        write_half(tmp_path / "out", WeightError("a weight is missing"), force=True)
    assert (tmp_path / "out" / "model").read_text() == "old" and names_in(tmp_path) == {"out"}


def changed_input(directory):
    (directory / "weights").write_bytes(b"longer")


def touched_input(directory):
    os.utime(directory / "weights", ns=(1, 1))


def further_input(directory):
    (directory / "more").touch()


@pytest.mark.parametrize("change", [changed_input, touched_input, further_input, None])
def test_another_conversion_begins_anew_and_says_so(tmp_path, caplog, change):
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(b"short")
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM, conversion(source, shards=1))
    if change:
        change(source)
    now = conversion(source, shards=1 if change else 2)
    with new_directory(tmp_path / "out", now, force=False, marker="model") as unfinished:
        assert not any(unfinished.output.iterdir()) and not any(unfinished.state.iterdir())
    (told,) = caplog.messages  # a warning, which goes to stderr unless the program says otherwise
    assert "another conversion" in told and "begins anew" in told


def test_the_same_conversion_says_nothing(tmp_path, caplog):
    for _ in range(2):
        with pytest.raises(OutputError):
            write_half(tmp_path / "out", NO_ROOM)
    assert caplog.messages == []


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_record_counts_for_nothing(tmp_path, text):
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM)
    (tmp_path / ".out.partial" / "conversion.json").write_text(text)
    write(tmp_path / "out", "new")
    assert names_in(tmp_path / "out") == {"model"}


def test_hidden_directories_are_no_input(tmp_path):
    (tmp_path / "source" / ".git").mkdir(parents=True)
    (tmp_path / "source" / ".metadata").touch()
    assert [Path(name).name for name in conversion(tmp_path / "source").record()["inputs"]] == [".metadata"]
    before = conversion(tmp_path / "source").record()
    (tmp_path / "source" / ".git" / "index").touch()
    assert conversion(tmp_path / "source").record() == before


def test_two_processes_do_not_write_one_output(tmp_path):
    with new_directory(tmp_path / "out", conversion(), force=False, marker="model") as unfinished:
        with pytest.raises(OutputError, match=r"another process is writing .*/out; wait until it has ended"):
            write(tmp_path / "out", "second")
        write(tmp_path / "other", "second")
        (unfinished.output / "model").write_text("first")
    assert (tmp_path / "out" / "model").read_text() == "first"


def test_a_lock_that_is_removed_while_it_is_waited_for_is_made_again(tmp_path, monkeypatch):
    """The process that had it ended between our opening and our locking."""
    flock, lock = fcntl.flock, tmp_path / ".out.partial" / "lock"
    seen = []

    def slow(descriptor, how):
        if not seen:
            seen.append(lock.stat().st_ino)
            lock.unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with new_directory(tmp_path / "out", conversion(), force=False, marker="model"):
        assert lock.is_file()
        monkeypatch.undo()
        with pytest.raises(OutputError, match="another process is writing"):
            write(tmp_path / "out", "second")


def test_the_one_that_ends_leaves_the_next_ones_lock_alone(tmp_path, monkeypatch):
    """The next process begins when the output is in its place, before the first gives its lock back."""
    close, following = Unfinished.close, []

    def slow(unfinished):
        monkeypatch.undo()
        following.append(Unfinished(tmp_path / "out"))
        close(unfinished)

    monkeypatch.setattr(Unfinished, "close", slow)
    write(tmp_path / "out", "new")
    with pytest.raises(OutputError, match="another process is writing"):
        write(tmp_path / "out", "third")
    following[0].begin({})
    assert following[0].exists
    following[0].close()


def test_a_file_system_without_locks_is_written(tmp_path, monkeypatch, caplog):
    def none(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model").read_text() == "new"
    (told,) = caplog.messages
    assert "cannot be locked" in told and f"run no second conversion into {tmp_path / 'out'}" in told


def test_an_output_that_exists_stops_before_anything_is_left(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "out", "new")
    assert names_in(tmp_path) == {"out"}


def test_an_interrupt_between_the_two_renamings_gives_the_old_output_back(tmp_path, monkeypatch):
    """A second one, while it comes back, does not change that: the command line ignores it."""
    write(tmp_path / "out", "old")
    rename = Path.rename

    def interrupted(self, target):
        if self.name == "output":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "model").read_text() == "old"
    assert names_in(tmp_path) == {"out", ".out.partial"}
    monkeypatch.undo()
    write(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "model").read_text() == "new" and names_in(tmp_path) == {"out"}


def test_an_old_output_without_the_new_one_comes_back(tmp_path):
    """As a kill between the two renamings leaves it, whatever is run next."""
    write(tmp_path / "out", "old")
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM, force=True)
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model").read_text() == "old" and names_in(tmp_path) == {"out", ".out.partial"}


@pytest.mark.parametrize(("new", "interrupted"), [(None, False), ("somebody's", False), ("somebody's", True)])
def test_an_old_output_of_unknown_origin_is_left_alone(tmp_path, new, interrupted):
    """It may be somebody's own copy: neither is it put back, to be replaced then, nor removed."""
    if interrupted:
        with pytest.raises(OutputError):
            write_half(tmp_path / "out", NO_ROOM)
    write(tmp_path / "copy", "old")
    (tmp_path / "copy").rename(tmp_path / ".out.old")
    if new:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model").write_text(new)
    before = names_in(tmp_path)
    with pytest.raises(
        OutputError, match=r"\.out\.old is in the way: it may hold an earlier output; move it to .*/out,"
    ):
        write(tmp_path / "out", "new", force=True)
    assert (tmp_path / ".out.old" / "model").read_text() == "old" and names_in(tmp_path) == before
    assert not new or (tmp_path / "out" / "model").read_text() == new


@pytest.mark.parametrize("step", ["_flush_directory", "discard", "remove"])
def test_an_interrupt_after_the_renaming_says_that_the_output_is_complete(tmp_path, monkeypatch, step):
    def interrupted(*_):
        patch.undo()
        raise KeyboardInterrupt

    write(tmp_path / "out", "old")
    with monkeypatch.context() as patch:
        if step.startswith("_"):
            flush = output._flush_directory
            patch.setattr(output, step, lambda path: interrupted() if path == tmp_path else flush(path))
        else:
            patch.setattr(Unfinished, step, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            write(tmp_path / "out", "new", force=True)
    assert caught.value.__notes__ == [f"{tmp_path / 'out'} is complete"]
    assert (tmp_path / "out" / "model").read_text() == "new"
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "out", "again")
    assert (tmp_path / "out" / "model").read_text() == "new" and names_in(tmp_path) == {"out"}


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch, caplog):
    def stuck(path):
        raise OSError(errno.EPERM, "Operation not permitted", str(path))

    write(tmp_path / "out", "old")
    monkeypatch.setattr(shutil, "rmtree", stuck)
    write(tmp_path / "out", "new", force=True)
    monkeypatch.undo()
    assert (tmp_path / "out" / "model").read_text() == "new"
    assert all(
        f"{tmp_path / '.out.partial'} is of no use any more, but cannot be removed" in m for m in caplog.messages
    )
    assert caplog.messages
    write(tmp_path / "out", "newer", force=True)
    assert names_in(tmp_path) == {"out"}


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_in_the_meantime_is_not_replaced(tmp_path, force):
    with (
        pytest.raises(OutputError, match="not empty"),
        new_directory(tmp_path / "out", conversion(), force=force, marker="model"),
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "photos").touch()
    assert names_in(tmp_path / "out") == {"photos"} and names_in(tmp_path) == {"out", ".out.partial"}


READERS = {
    "inspect": lambda path: main(["inspect", str(path)]),
    "verify": lambda path: main(["verify", str(path), str(path)]),
    "hf-to-torch-dist": lambda path: main(["hf-to-torch-dist", "--hf-checkpoint", str(path), "--save", "x"]),
    "hf-to-fp8": lambda path: main(["hf-to-fp8", "--hf-checkpoint", str(path), "--save", "x"]),
    "torch-dist-to-hf": lambda path: TorchDistReader(path),
    "megatron-to-hf": lambda path: detect(path, (LEGACY, TORCH_DIST)),
    "HfReader": lambda path: HfReader(path),
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
        told = capsys.readouterr().err
    except UnfinishedError as error:
        told = str(error)
    assert "is unfinished: a conversion into " in told and str(tmp_path / "out") in told


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "model").read_text() == "new"


def test_places_that_cannot_be_renamed_over_are_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is the working directory; choose a directory inside it"):
        write(".", "new")
    with pytest.raises(OutputError, match="output /proc is a mount point; choose a directory inside it"):
        write("/proc", "new", force=True)


@pytest.mark.parametrize("place", ["n" * 300, "n" * 250, "loop/out", "\0"])
def test_names_that_no_file_can_have_are_told(tmp_path, place):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="choose a shorter name" if place[0] == "n" else "choose a directory"):
        write(tmp_path / place, "new")
    assert names_in(tmp_path) == {"loop"}


@pytest.mark.parametrize("name", ["n" * 246, "ü" * 123, "out/", "a/../out", ".out", "out.partial", "\udcff", "out\n"])
def test_unusual_names_are_written(tmp_path, name):
    (tmp_path / "a").mkdir()
    write(f"{tmp_path}/{name}", "old")
    with pytest.raises(OutputError):
        write_half(f"{tmp_path}/{name}", NO_ROOM, force=True)
    write(f"{tmp_path}/{name}", "new", force=True)
    assert Path(f"{tmp_path}/{name}/model").read_text() == "new" and len(names_in(tmp_path)) == 2


def test_a_private_directory_stays_private(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new", force=True)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_directories_need_not_be_flushed_where_that_is_not_possible(tmp_path, monkeypatch, code):
    fsync = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    if code == errno.EINVAL:
        write(tmp_path / "out", "new")
        assert names_in(tmp_path) == {"out"}
    else:
        with pytest.raises(OutputError, match=r"Input/output error.*again to continue"):
            write(tmp_path / "out", "new")
        assert names_in(tmp_path) == {".out.partial"}


def test_an_input_that_cannot_be_read_is_told_as_such(tmp_path):
    (tmp_path / "source").mkdir()
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "source" / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"cannot read .*/source/tokenizer\.json \(Permission denied\); make it"):
        write_half(tmp_path / "out", error, conversion(tmp_path / "source"))
    full = OSError(28, "No space left on device", str(tmp_path / "source" / "x"), None, str(tmp_path / "x"))
    with pytest.raises(OutputError, match="No space left on device"):
        write_half(tmp_path / "out", full, conversion(tmp_path / "source"))


def test_a_source_tree_that_is_not_installed_converts(tmp_path, monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model").read_text() == "new"


def test_another_version_begins_anew(tmp_path, monkeypatch):
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    write(tmp_path / "out", "new")
    assert names_in(tmp_path / "out") == {"model"}


def test_a_full_disk_while_the_record_is_written_leaves_nothing(tmp_path, monkeypatch):
    write_text = Path.write_text

    def half(path, text, **kwargs):
        write_text(path, text[: len(text) // 2], **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        write(tmp_path / "out", "new")
    assert "again to continue" not in str(caught.value) and names_in(tmp_path) == set()


def test_everything_is_on_the_disk_before_the_renaming_and_the_renaming_after_it(tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename

    def flushed(descriptor):
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(source, target):
        done.append(f"{Path(source).name} renamed")
        rename(source, target)

    write(tmp_path / "out", "old")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    write(tmp_path / "out", "new", force=True)
    assert done[-6:] == ["model", "output", "out renamed", "output renamed", tmp_path.name, ".out.old renamed"]
