"""The process that holds a run together."""

from __future__ import annotations

import os
import pickle
import tempfile

from slime_launch.driver import keep_files_private, read


def test_temporary_files_are_this_users_and_what_torch_compiles_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_files_private(tmp_path)
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "tmp")
    assert (tmp_path / "tmp").stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "slime" / "inductor")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_what_the_starter_wrote_is_read(tmp_path):
    (tmp_path / "cluster.pickle").write_bytes(pickle.dumps({"ranks": 2}))
    assert read(tmp_path / "cluster.pickle") == {"ranks": 2}
