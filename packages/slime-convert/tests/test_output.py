import os
import stat
from pathlib import Path

import pytest

from slime_convert.errors import OutputError
from slime_convert.output import new_directory


def write(target, text, **kwargs):
    settings = {"force": False, "keep": frozenset(), "marker": "model"} | kwargs
    with new_directory(target, **settings) as directory:
        (directory / "model").write_text(text)


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


def test_an_error_while_writing_keeps_the_old_output(tmp_path):
    write(tmp_path / "out", "old")
    with (
        pytest.raises(OutputError, match="No space"),
        new_directory(tmp_path / "out", force=True, keep=frozenset(), marker="model"),
    ):
        raise OSError(28, "No space left on device")
    assert (tmp_path / "out" / "model").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_between_the_two_renamings_gives_the_old_output_back(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename = Path.rename

    def interrupted(self, target):
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "new", force=True)
    assert (tmp_path / "out" / "model").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_in_the_meantime_is_not_replaced(tmp_path, force):
    with (
        pytest.raises(OutputError, match="not empty"),
        new_directory(tmp_path / "out", force=force, keep=frozenset(), marker="model"),
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "photos").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "photos"]


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
