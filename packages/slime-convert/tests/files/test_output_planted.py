"""Outputs and unfinished outputs that somebody else prepared, so that a conversion would remove or overwrite files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from slime_convert.errors import CheckpointError, OutputError, WeightError
from slime_convert.files.output import MANIFEST, new_directory
from slime_convert.files.partial import Conversion
from support.family_models import tree
from support.outputs import NO_ROOM, conversion, write, write_half


@pytest.mark.parametrize("name", ["../victim", "{root}/victim", "below/../../victim", "link/victim", "./model", ""])
def test_a_list_of_files_that_names_others(tmp_path, name):
    """The list travels with a model that is downloaded."""
    write(tmp_path / "out", "old")
    (tmp_path / "victim").write_text("mine")
    if name.startswith("link"):
        (tmp_path / "out" / "link").symlink_to(tmp_path)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["files"][name.format(root=tmp_path)] = 4
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="is not as slime-convert wrote it"):
        write(tmp_path / "out", "new", force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["empty", "below/empty"])
def test_a_strangers_empty_directory(tmp_path, name):
    write(tmp_path / "out", "old", names=("below/model",))
    (tmp_path / "out" / name).mkdir()
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=f"it holds {name}"):
        write(tmp_path / "out", "new", force=True)
    assert tree(tmp_path) == before


def names_others(root, left):
    (left / "files").write_text(f'"../../thesis"\n"{root}/thesis"\n')


def names_no_text(root, left):
    (left / "files").write_text("[3]\n")


def linked_list(root, left):
    (left / "files").unlink()
    (left / "files").symlink_to(root / "thesis")


def linked_record(root, left):
    (left / "conversion.json.new").symlink_to(root / "thesis")


def second_name(root, left):
    (left / "files").unlink()
    (left / "files").hardlink_to(root / "thesis")


def linked_output(root, left):
    (left / "output").rmdir()
    (left / "output").symlink_to(root / "home")
    (left / "files").write_text('"model"\n')


def linked_earlier(root, left):
    (left / "earlier").symlink_to(root / "home")


def missing_lock(root, left):
    (left / "lock").unlink()


def more(root, left):
    (left / "photo").write_text("mine")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "plant",
    [
        names_others,
        names_no_text,
        linked_list,
        linked_record,
        second_name,
        linked_output,
        linked_earlier,
        missing_lock,
        more,
    ],
)
def test_a_planted_unfinished_output_is_refused(tmp_path, plant, force):
    left = tmp_path / ".out.partial"
    (left / "output").mkdir(parents=True)
    (left / "conversion.json").write_text('{"program": "slime-convert"}')
    for name in ("lock", "files"):
        (left / name).touch()
    write(tmp_path / "home", "old")
    (tmp_path / "thesis").write_text('"model"\n')
    plant(tmp_path, left)
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"\.out\.partial was not made by this version of slime-convert; move it"):
        write(tmp_path / "out", "new", force=force)
    assert tree(tmp_path) == before


def test_a_kept_file_with_a_second_name_is_not_written(tmp_path):
    with pytest.raises(OutputError):
        write_half(tmp_path / "out", NO_ROOM)
    (tmp_path / "thesis").write_text("mine")
    half = tmp_path / ".out.partial" / "output" / "half"
    half.unlink()
    half.hardlink_to(tmp_path / "thesis")
    before = tree(tmp_path)
    for what in (conversion(), conversion(other=True)):
        with pytest.raises(OutputError, match="output/half was not made by slime-convert"):
            write_half(tmp_path / "out", NO_ROOM, what)
        assert tree(tmp_path) == before


def test_the_output_is_replaced_while_it_is_written(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "model").write_text("mine")
    with (
        pytest.raises(OutputError, match=r"\.out\.partial/output was not made by slime-convert"),
        new_directory(tmp_path / "out", conversion(), force=False) as partial,
    ):
        partial.create("model")
        partial.output.rename(tmp_path / "moved")
        partial.output.symlink_to(tmp_path / "home")
        partial.write("model", b"new")
    assert (tmp_path / "home" / "model").read_text() == "mine" and not (tmp_path / "out").exists()


def test_a_directory_of_the_output_is_replaced_by_a_link(tmp_path):
    (tmp_path / "home").mkdir()
    with (
        pytest.raises(OutputError, match="output/release was not made by slime-convert"),
        new_directory(tmp_path / "out", conversion(), force=False) as partial,
    ):
        (partial.output / "release").symlink_to(tmp_path / "home")
        partial.write("release/model", b"new")
    assert list((tmp_path / "home").iterdir()) == []


def to_link(out):
    shutil.rmtree(out)
    out.symlink_to("home")


def to_file(out):
    shutil.rmtree(out)
    out.write_text("mine")


def to_another(out):
    shutil.rmtree(out)
    out.with_name("home").rename(out)


def to_empty(out):
    kept = out.with_name("kept")
    out.rename(kept)
    out.mkdir()


@pytest.mark.parametrize("change", [to_link, to_file, to_another, to_empty])
def test_what_is_put_in_the_place_of_the_earlier_output_stays(tmp_path, change):
    write(tmp_path / "out", "old")
    write(tmp_path / "home", "precious")
    with (
        pytest.raises(OutputError, match=r"out was replaced during the conversion; move it elsewhere, and run"),
        new_directory(tmp_path / "out", conversion(), force=True) as partial,
    ):
        partial.write("model", b"new")
        change(tmp_path / "out")
        before = {name: state for name, state in tree(tmp_path).items() if not name.startswith(".")}
    after = tree(tmp_path)
    assert {name: state for name, state in after.items() if not name.startswith(".")} == before
    assert ".out.partial/output/model" in after and ".out.partial/earlier" not in after


@pytest.mark.parametrize("change", [lambda file: file.write_bytes(b"other"), Path.unlink])
def test_an_input_that_changes_meanwhile_is_noticed(tmp_path, change):
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    with (
        pytest.raises(CheckpointError, match="was changed while it was read; run the command again"),
        new_directory(tmp_path / "out", Conversion("test", (source,)), force=False) as partial,
    ):
        partial.write("weights", source.read_bytes())
        change(source)
    assert {path.name for path in tmp_path.iterdir()} <= {"model.safetensors"}


def test_a_log_may_grow_beside_an_input(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "train.log").write_text("step 1")
    with new_directory(tmp_path / "out", Conversion("test", (source,)), force=False) as partial:
        partial.write("weights", b"")
        (source / "train.log").write_text("step 1, step 2")
    assert (tmp_path / "out" / "weights").exists()


def test_an_input_whose_time_was_put_back_is_not_continued_with(tmp_path):
    source = tmp_path / "model"
    source.write_bytes(b"weights")
    before = Conversion("test", (source,))
    found = source.stat()
    source.write_bytes(b"strange")
    os.utime(source, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert Conversion("test", (source,)).record() != before.record()


@pytest.mark.parametrize("error", [ValueError, WeightError])
def test_what_an_earlier_run_wrote_outlives_an_error(tmp_path, error):
    conversion = Conversion("test", ())
    for failure in (KeyboardInterrupt, error):
        with pytest.raises(failure), new_directory(tmp_path / "out", conversion, force=False) as partial:
            partial.write(failure.__name__, b"done")
            raise failure
    assert (tmp_path / ".out.partial" / "output" / "KeyboardInterrupt").read_bytes() == b"done"
