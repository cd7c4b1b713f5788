import os
from pathlib import Path

from slime_core.files import write_whole


def test_a_file_is_whole(tmp_path):
    write_whole(tmp_path / "file", "old")
    write_whole(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "new"


def test_its_bytes_are_on_disk_before_it_has_its_name_and_its_name_before_it_is_done(tmp_path, monkeypatch):
    done = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append("replace") or replace(path, to))
    write_whole(tmp_path / "file", "text")
    assert done == [".file.partial", "replace", tmp_path.name]
