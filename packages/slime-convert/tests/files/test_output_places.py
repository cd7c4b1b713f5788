"""Where an output may lie, and under which names."""

import stat
from pathlib import Path

import pytest

from slime_convert.errors import OutputError
from slime_convert.files.output import new_directory
from support.outputs import NO_ROOM, conversion, names_in, write, write_half


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
def test_names_that_a_file_cannot_have(tmp_path, place):
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


def test_an_output_in_its_input_is_refused(tmp_path):
    """It would be an input of the next run, and be removed with it."""
    (tmp_path / "model").mkdir()
    for place in (tmp_path / "model", tmp_path / "model" / "a" / "b", tmp_path):
        with (
            pytest.raises(OutputError, match="the input"),
            new_directory(place, conversion(tmp_path / "model"), force=True),
        ):
            pass
    (tmp_path / "link").symlink_to("model")
    with (
        pytest.raises(OutputError, match="lies in the input"),
        new_directory(tmp_path / "link" / "out", conversion(tmp_path / "model"), force=False),
    ):
        pass
    assert list((tmp_path / "model").iterdir()) == []


def test_missing_parents_are_created(tmp_path):
    write(tmp_path / "a" / "b", "new")
    assert (tmp_path / "a" / "b" / "model").read_text() == "new"
