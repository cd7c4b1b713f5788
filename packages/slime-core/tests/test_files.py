import gzip
import os
import stat
from pathlib import Path

import pytest

from slime_core.errors import DamagedError, DataError
from slime_core.files import (
    naming_damage,
    open_file,
    open_to_append,
    read_bytes,
    read_gzip,
    read_json,
    read_text,
    whole_file,
    write_whole,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_whole(tmp_path):
    write_whole(tmp_path / "file", "old")
    write_whole(tmp_path / "file", "new")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "new"


def test_its_bytes_are_on_disk_before_it_has_its_name_and_its_name_before_it_is_done(tmp_path, monkeypatch):
    done = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    monkeypatch.setattr(Path, "replace", lambda path, to: done.append("replace") or replace(path, to))
    write_whole(tmp_path / "file", "text")
    partial, *rest = done
    assert partial.startswith(".file.") and partial.endswith(".partial") and rest == ["replace", tmp_path.name]


@pytest.mark.parametrize("name", ["file", ".file.partial", ".file.0123456789abcdef.partial"])
def test_no_planted_link_is_followed(tmp_path, name):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    there = tmp_path / "there"
    there.mkdir()
    (there / name).symlink_to(mine)
    write_whole(there / "file", "text")
    assert mine.read_text() == "mine"
    assert (there / "file").read_text() == "text" and not (there / "file").is_symlink()


def test_a_name_is_known_to_nobody_before(tmp_path):
    found = []
    for _ in range(2):
        with whole_file(tmp_path / "file") as partial:
            assert partial.is_file() and partial.parent == tmp_path
            found.append(partial.name)
    assert len({*found}) == 2


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_its_mode_follows_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_of_a_failure_the_old_file_is_left_and_nothing_else(tmp_path):
    write_whole(tmp_path / "file", "old")
    with pytest.raises(RuntimeError, match="halfway"), whole_file(tmp_path / "file") as partial:
        partial.write_text("new")
        raise RuntimeError("halfway")
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_what_killed_writers_have_left_goes_and_other_files_stay(tmp_path):
    left = [".file.0123456789abcdef.partial", ".file.1111111111111111.partial"]
    others = [
        ".file.1.part",
        ".file.more.0123456789abcdef.partial",
        ".files.1.partial",
        ".other.1.partial",
        "file.1.partial",
    ]
    for name in [*left, *others]:
        (tmp_path / name).write_text("half")
    (tmp_path / ".file.dddddddddddddddd.partial").mkdir()
    write_whole(tmp_path / "file", "text")
    assert names(tmp_path) == sorted([*others, "file", ".file.dddddddddddddddd.partial"])


def test_what_cannot_be_written_is_named_as_given(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "no" / "file", "text")
    assert caught.value.filename == str(tmp_path / "no" / "file")


@pytest.fixture(params=["pipe", "socket", "device", "link to a device", "directory"])
def no_file(request, tmp_path):
    path = tmp_path / "x"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        os.mknod(path, stat.S_IFSOCK)
    elif request.param == "directory":
        path.mkdir()
    elif request.param == "device":
        return Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("read", [open_file, read_bytes, read_text, lambda path: read_gzip(path, most=9)])
def test_what_has_no_end_is_not_read(no_file, read):
    with pytest.raises(DataError, match=f"^{no_file} is not a regular file, so it is not read"):
        read(no_file)


def test_a_file_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "x"
    path.write_bytes("12345678ä".encode())
    assert read_bytes(path, most=10) == path.read_bytes() and read_text(path, most=10) == "12345678ä"
    with pytest.raises(DataError, match="x has 10 bytes; at most 9 are read"):
        read_bytes(path, most=9)
    os.truncate(path, 2**40)  # sparse: it takes no room on the disk
    with pytest.raises(DataError, match=r"x has 1,099,511,627,776 bytes; at most 536,870,912 are read"):
        read_bytes(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "y")


def test_what_is_packed_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"a" * 500) + gzip.compress(b"b" * 500))
    assert read_gzip(path, most=1000) == b"a" * 500 + b"b" * 500
    with pytest.raises(DataError, match=r"x\.gz unpacks to more than 999 bytes"):
        read_gzip(path, most=999)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(EOFError):
        read_gzip(path, most=1000)


def test_what_is_added_to_is_a_regular_file(tmp_path):
    with open_to_append(tmp_path / "log") as file:
        file.write("one ")
    with open_to_append(tmp_path / "log") as file:
        file.write("two")
    assert (tmp_path / "log").read_text() == "one two"
    (tmp_path / "link").symlink_to(tmp_path / "log")
    (tmp_path / "to nothing").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/full")
    for name in ("link", "to nothing", "pipe", "device"):
        with pytest.raises(DataError, match=f"{name} is not a regular file, so nothing is added to it; remove it"):
            open_to_append(tmp_path / name)
    assert (tmp_path / "log").read_text() == "one two" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[1,]", b"\xff", b"", b"9" * 5000])
def test_what_is_no_json_is_a_value_error(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "a.json") == {"a": [1]}


@pytest.mark.parametrize(
    "cause", [KeyError("a"), TypeError("no\nnumber"), RecursionError(), OverflowError("too large")]
)
def test_damage_is_named_with_its_file(cause):
    said = rf"^a.json is damaged \({type(cause).__name__}: .*\); get it again$"
    with pytest.raises(DamagedError, match=said), naming_damage("a.json"):
        raise cause
    with pytest.raises(OSError, match="gone"), naming_damage("a.json"):
        raise OSError("gone")
