"""Folders of temporary files of one process."""

import os
import stat
import subprocess
import tempfile

from slime_rollout.supervise.folders import private_folder


def test_a_folder_is_this_users_alone_and_those_of_processes_that_are_gone_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as gone:
        pass
    names = (f"slime-x-{gone.pid}-left", f"slime-x-{os.getpid()}-used", f"other-{gone.pid}-left")
    left, used, other = (tmp_path / name for name in names)
    for folder in (left, used, other):
        folder.mkdir()
    (tmp_path / f"slime-x-{gone.pid}-link").symlink_to(other)
    made = private_folder("slime-x-", longest=len(str(tmp_path)))
    assert made.name.startswith(f"slime-x-{os.getpid()}-") and stat.S_IMODE(made.stat().st_mode) == 0o700
    assert [path.exists() for path in (left, used, other)] == [False, True, True]
    assert private_folder("slime-x-", longest=1).parent != tmp_path  # whose path is too long for a socket's
