import os
import stat

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
