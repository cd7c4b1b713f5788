"""Outputs appear whole or not at all, and nothing that somebody else made is removed, replaced or written into."""

import errno
import importlib.metadata
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_convert.errors import OutputError, WeightError
from slime_convert.files import output
from slime_convert.files.output import MANIFEST, new_directory
from slime_convert.files.partial import Partial
from support.family_models import tree
from support.outputs import NO_ROOM, conversion, names_in, write, write_half


def test_an_empty_directory_may_exist(tmp_path):
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model").read_text() == "new"


def test_the_list_of_files_says_what_wrote_them(tmp_path):
    write(tmp_path / "out", "new", names=("model", "below/more"))
    listed = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert listed["command"] == "test" and listed["files"] == {"below/more": 3, "model": 3}
    assert listed["slime-convert"] == importlib.metadata.version("slime-convert")


def test_force_replaces_an_earlier_output(tmp_path):
    write(tmp_path / "out", "old", names=("model", "below/stale"))
    write(tmp_path / "out", "new", force=True)
    assert names_in(tmp_path / "out") == {"model"} and names_in(tmp_path) == {"out"}


class TestForce:
    """D1: ``--force`` deleted directories that were not earlier outputs."""

    @pytest.mark.parametrize("name", ["photos", ".hidden", "below/more", "model/x", "model.bak"])
    def test_a_directory_with_anything_else_is_not_replaced(self, tmp_path, name):
        write(tmp_path / "out", "old", names=("below/model",))
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
        before = tree(tmp_path)
        with pytest.raises(OutputError, match=r"is not as slime-convert wrote it \(it holds .*does not replace it"):
            write(tmp_path / "out", "new", force=True)
        assert tree(tmp_path) == before

    def test_a_file_that_was_changed_is_not_replaced(self, tmp_path):
        write(tmp_path / "out", "old")
        (tmp_path / "out" / "model").write_text("edited")
        before = tree(tmp_path)
        with pytest.raises(OutputError, match="it holds model"):
            write(tmp_path / "out", "new", force=True)
        assert tree(tmp_path) == before

    def test_a_link_in_the_place_of_a_file_is_not_followed(self, tmp_path):
        write(tmp_path / "out", "old")
        (tmp_path / "mine").write_text("old")
        (tmp_path / "out" / "model").unlink()
        (tmp_path / "out" / "model").symlink_to(tmp_path / "mine")
        before = tree(tmp_path)
        with pytest.raises(OutputError, match="it holds model"):
            write(tmp_path / "out", "new", force=True)
        assert tree(tmp_path) == before

    @pytest.mark.parametrize("manifest", ["", "[]", '{"files": {"photo": 4}}', '{"slime-convert": "1", "files": 3}'])
    def test_a_list_that_is_not_ours_counts_for_nothing(self, tmp_path, manifest):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "photo").write_text("mine")
        (tmp_path / "out" / MANIFEST).write_text(manifest)
        before = tree(tmp_path)
        with pytest.raises(OutputError, match="it holds photo"):
            write(tmp_path / "out", "new", force=True)
        assert tree(tmp_path) == before

    @pytest.mark.timeout(20)
    def test_a_pipe_by_the_lists_name(self, tmp_path):
        (tmp_path / "out").mkdir()
        os.mkfifo(tmp_path / "out" / MANIFEST)
        (tmp_path / "out" / "photo").touch()
        with pytest.raises(OutputError, match="is not as slime-convert wrote it"):
            write(tmp_path / "out", "new", force=True)

    @pytest.mark.parametrize("manifest", [None, '{"slime-convert": "0.2", "files": 3}'])
    def test_a_release_without_a_list_may_be_anybodys(self, tmp_path, manifest):
        """Version 0.1 wrote none, and neither does torch.distributed.checkpoint, with the same names."""
        release = tmp_path / "out" / "release"
        release.mkdir(parents=True)
        for name in ("common.pt", "metadata.json", ".metadata", "__0_0.distcp"):
            (release / name).write_text("old")
        (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("release")
        if manifest:
            (tmp_path / "out" / MANIFEST).write_text(manifest)
        before = tree(tmp_path)
        with pytest.raises(OutputError, match="is not as slime-convert wrote it"):
            write(tmp_path / "out", "new", force=True)
        assert tree(tmp_path) == before

    def test_a_trainers_iterations_beside_a_release_stay(self, tmp_path):
        write(tmp_path / "out", "old", names=("release/common.pt",))
        (tmp_path / "out" / "iter_0000010").mkdir()
        (tmp_path / "out" / "iter_0000010" / "weights").write_text("days of work")
        before = tree(tmp_path)
        with pytest.raises(OutputError, match=r"it holds iter_0000010/weights"):
            write(tmp_path / "out", "new", force=True)
        assert tree(tmp_path) == before

    def test_what_is_put_there_during_the_conversion_stays(self, tmp_path):
        write(tmp_path / "out", "old")
        with (
            pytest.raises(OutputError, match="it holds photo"),
            new_directory(tmp_path / "out", conversion(), force=True) as partial,
        ):
            partial.write("model", b"new")
            (tmp_path / "out" / "photo").write_text("mine")
        assert (tmp_path / "out" / "photo").read_text() == "mine"
        assert (tmp_path / "out" / "model").read_text() == "old"


def test_a_refused_conversion_leaves_nothing(tmp_path):
    """Its parents included."""
    (tmp_path / "file").touch()
    before = tree(tmp_path)
    with pytest.raises(WeightError):
        write_half(tmp_path / "a" / "b" / "out", WeightError("a weight is missing"))
    for target in (tmp_path / "file" / "out", tmp_path / "a" / ("n" * 300), tmp_path / "a" / "\0" / "b"):
        with pytest.raises(OutputError, match="cannot write"):
            write(target, "new")
    assert tree(tmp_path) == before


def test_a_file_in_the_place_of_an_output(tmp_path):
    (tmp_path / "photo").write_text("mine")
    for force in (False, True):
        with pytest.raises(OutputError, match="is a file; choose a directory that does not exist yet"):
            write(tmp_path / "photo", "new", force=force)
    assert (tmp_path / "photo").read_text() == "mine"


def test_outputs_are_as_readable_as_any_new_file(tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "out", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / "model").stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [NO_ROOM, KeyboardInterrupt()])
def test_what_is_interrupted_is_kept_and_said(tmp_path, error):
    write(tmp_path / "out", "old")
    with pytest.raises((OutputError, KeyboardInterrupt)) as caught:
        write_half(tmp_path / "out", error, force=True)
    message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert f"run the same command again to continue, or delete {tmp_path / '.out.partial'}" in message
    assert (tmp_path / "out" / "model").read_text() == "old"
    assert names_in(tmp_path) == {"out", ".out.partial"}
    with new_directory(tmp_path / "out", conversion(), force=True) as partial:
        assert names_in(partial.output) == {"half"}
        partial.write("model", b"new")
    assert names_in(tmp_path / "out") == {"half", "model"} and names_in(tmp_path) == {"out"}


def test_after_a_wrong_input_nothing_is_kept(tmp_path):
    write(tmp_path / "out", "old")
    before = tree(tmp_path)
    with pytest.raises(WeightError):
        write_half(tmp_path / "out", WeightError("a weight is missing"), force=True)
    assert tree(tmp_path) == before


def test_an_interrupt_between_the_two_renamings_gives_the_old_output_back(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("step", ["_flush", "_remove_earlier", "remove"])
def test_an_interrupt_after_the_renaming_says_that_the_output_is_complete(tmp_path, monkeypatch, step):
    def interrupted(*_):
        patch.undo()
        raise KeyboardInterrupt

    write(tmp_path / "out", "old")
    with monkeypatch.context() as patch:
        if step == "remove":
            patch.setattr(Partial, step, interrupted)
        else:
            call, partial = getattr(output, step), tmp_path / ".out.partial"
            last = (tmp_path, partial / "earlier")
            patch.setattr(
                output,
                step,
                lambda path: interrupted() if path in last and not (partial / "output").exists() else call(path),
            )
        with pytest.raises(KeyboardInterrupt) as caught:
            write(tmp_path / "out", "new", force=True)
    more = "" if step == "remove" else f"; delete {tmp_path / '.out.partial'}"
    assert caught.value.__notes__ == [f"{tmp_path / 'out'} is complete{more}"]
    assert (tmp_path / "out" / "model").read_text() == "new"
    with pytest.raises(OutputError, match="exists already"):
        write(tmp_path / "out", "again")
    assert (tmp_path / "out" / "model").read_text() == "new"
    write(tmp_path / "out", "newer", force=True)
    assert names_in(tmp_path) == {"out"}


def test_what_cannot_be_removed_is_said(tmp_path, monkeypatch, caplog):
    unlink = Path.unlink

    def stuck(path, **kwargs):
        if "earlier" in path.parts:
            raise OSError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, **kwargs)

    write(tmp_path / "out", "old")
    monkeypatch.setattr(Path, "unlink", stuck)
    write(tmp_path / "out", "new", force=True)
    monkeypatch.undo()
    assert (tmp_path / "out" / "model").read_text() == "new"
    assert any("was replaced, but cannot be removed" in message for message in caplog.messages)
    assert (tmp_path / ".out.partial" / "earlier" / "model").read_text() == "old"


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_in_the_meantime_is_not_replaced(tmp_path, force):
    with pytest.raises(OutputError), new_directory(tmp_path / "out", conversion(), force=force) as partial:
        partial.write("model", b"new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "photos").touch()
    assert names_in(tmp_path / "out") == {"photos"} and names_in(tmp_path) == {"out", ".out.partial"}


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


def test_a_source_tree_that_is_not_installed_converts(tmp_path, monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    write(tmp_path / "out", "new")
    write(tmp_path / "out", "newer", force=True)
    assert (tmp_path / "out" / "model").read_text() == "newer"


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
    put = done.index("out renamed")
    assert {*done[put - 3 : put]} == {"model", MANIFEST, "output"} and done[put - 1] == "output"
    assert done[put:] == ["out renamed", "output renamed", tmp_path.name, ".out.partial renamed"]


NAMES = st.sampled_from(
    ["a", "b/c", "model", "release/x", ".hidden", "output", "lock", "files", "conversion.json", MANIFEST]
)
PLACES = ("", "out/", ".out.partial/", ".out.partial/output/", ".out.old/", "above/")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strangers=st.lists(
        st.tuples(st.sampled_from(PLACES), NAMES, st.sampled_from(["file", "link", "pipe"])), max_size=6
    ),
    earlier=st.sampled_from([None, "whole", "interrupted", "another"]),
    force=st.booleans(),
    fails=st.sampled_from([None, WeightError("wrong"), NO_ROOM, KeyboardInterrupt()]),
)
def test_strangers_files_are_all_there_afterwards(tmp_path_factory, strangers, earlier, force, fails):
    """Beside, above and inside the output and its unfinished form, whatever happens."""
    root = tmp_path_factory.mktemp("place")
    out = root / "above" / "out"
    if earlier == "whole":
        write(out, "old", names=("model", "below/more"))
    elif earlier:
        with pytest.raises(KeyboardInterrupt):
            write_half(out, KeyboardInterrupt(), conversion(**({"other": 1} if earlier == "another" else {})))
    (root / "target").write_text("mine")
    ours = set(tree(root)) - {"target"}
    for place, name, kind in strangers:
        path = (root / "above" / place / name) if place != "above/" else root / "above" / name
        if os.path.lexists(path) or any(parent.exists() and not parent.is_dir() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            path.write_text("mine")
        elif kind == "link":
            path.symlink_to(root / "target")
        else:
            os.mkfifo(path)
    theirs = {name: state for name, state in tree(root).items() if name not in ours}
    try:
        with new_directory(out, conversion(), force=force) as partial:
            partial.write("model", b"new")
            if fails:
                raise fails
    except (OutputError, WeightError, KeyboardInterrupt):
        pass
    after = tree(root)
    assert {name: after.get(name) for name in theirs} == theirs
