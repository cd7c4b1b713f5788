import dataclasses
import errno
import fcntl
import json
import signal
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from slime_core.errors import DataError
from slime_launch.calls import Watch
from slime_launch.errors import ManifestError
from slime_launch.flags import parse_train
from slime_launch.manifest import LOCK, Manifest, locked, read_manifest, write_manifest
from slime_launch.preflight import Checked
from slime_launch.resume import StartWeights
from slime_launch.run import run


def manifest(iteration: int, checkpoint: str | None = None) -> Manifest:
    return Manifest(
        iteration=iteration,
        weight_version=iteration,
        checkpoint=checkpoint,
        source_state={"position": iteration},
        flags={"lr": 1e-6, "eval_prompt_data": ["a", "b"]},
        output_dir="out",
        load="dist/release",
        ref_load="dist/release",
    )


def test_round_trip(tmp_path):
    (tmp_path / "iter_0000003").mkdir()
    write_manifest(tmp_path, manifest(3, "iter_0000003"))
    assert read_manifest(tmp_path) == manifest(3, "iter_0000003")


def test_a_data_sources_state_may_have_numbers_of_numpy(tmp_path):
    (tmp_path / "iter_0000003").mkdir()
    state = {"position": np.int64(3), "order": np.arange(3)}
    write_manifest(tmp_path, dataclasses.replace(manifest(3, "iter_0000003"), source_state=state))
    assert read_manifest(tmp_path).source_state == {"position": 3, "order": [0, 1, 2]}


def test_none_is_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


def test_a_half_written_one_is_ignored(tmp_path):
    write_manifest(tmp_path, manifest(1))
    (tmp_path / ".manifest.json.1.partial").write_text('{"format_version": 1, "iter')
    assert read_manifest(tmp_path) == manifest(1)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 2, "iteration": 3}'])
def test_an_invalid_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="is not a valid manifest"):
        read_manifest(tmp_path)


def test_another_format_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 1}))
    with pytest.raises(
        ManifestError, match="format_version 1; this slime reads 2: finish that run with the slime that"
    ):
        read_manifest(tmp_path)


def test_a_missing_checkpoint_is_named(tmp_path):
    write_manifest(tmp_path, manifest(4, "iter_0000004"))
    with pytest.raises(ManifestError, match="iter_0000004, which is not there"):
        read_manifest(tmp_path)


WRITER = """
import json, sys
from pathlib import Path
from slime_launch.manifest import Manifest, write_manifest
values = json.loads(sys.argv[2])
for iteration in range(1, 1_000_000):
    state = {"padding": "x" * 200_000}
    write_manifest(Path(sys.argv[1]), Manifest(**values | {"iteration": iteration, "source_state": state}))
    print(iteration, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_manifest(tmp_path):
    values = json.dumps(dataclasses.asdict(manifest(0)))
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), values], stdout=subprocess.PIPE, text=True
        )
        try:
            for _ in range(3):
                last = int(writer.stdout.readline())
        finally:
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
            writer.wait(10)
        last = int(rest[-1]) if rest else last
        found = read_manifest(tmp_path)
        assert found.iteration in (last, last + 1)
        assert len(found.source_state["padding"]) == 200_000


HOLDER = """
import sys, time
from pathlib import Path
from slime_launch.manifest import locked
with locked(Path(sys.argv[1]), check=lambda: None):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that uses `save`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "save"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_directory_is_used_by_one_run_at_a_time(tmp_path, holder):
    message = rf"--save .*save is in use by another run \(process {holder.pid} on \S+\); stop it, or give another"
    with pytest.raises(ManifestError, match=message), locked(tmp_path / "save", check=lambda: None, seconds=0.3):
        pass
    with locked(tmp_path / "other", check=lambda: None, seconds=0):
        pass


def test_a_killed_run_is_waited_for_and_leaves_the_directory_free(tmp_path, holder):
    waits = iter(range(3))

    def check():
        if next(waits) == 2:
            holder.send_signal(signal.SIGKILL)

    with locked(tmp_path / "save", check=check, seconds=60):
        assert next(waits, None) is None
    assert (tmp_path / "save" / LOCK).read_text() != f"process {holder.pid}"


def test_nothing_is_left_of_a_run_that_put_nothing_into_it(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for directory in (tmp_path / "new", old, tmp_path / "used"):
        with locked(directory, check=lambda: None):
            if directory.name == "used":
                (directory / "manifest.json").touch()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        *("old", "old/run.lock", "used", "used/manifest.json", "used/run.lock")
    ]


def test_a_lock_that_was_removed_is_no_lock(tmp_path, monkeypatch):
    """Another run ended, and took its new directory away, between our opening and our locking of the file."""
    path, real = tmp_path / "save" / LOCK, fcntl.flock

    def flock(file, how):
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    save = tmp_path / "save"
    with (
        locked(save, check=lambda: None),
        pytest.raises(ManifestError),
        locked(save, check=lambda: None, seconds=0),
    ):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch, number):
    def flock(file, how):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "save", check=lambda: None, seconds=0):
        assert (tmp_path / "save" / LOCK).exists()


def test_a_signal_ends_the_wait(tmp_path, holder):
    def check():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), locked(tmp_path / "save", check=check):
        pass


def test_a_second_launcher_starts_nothing(tmp_path, holder, capsys, monkeypatch):
    monkeypatch.setattr("slime_launch.manifest.LOCK_SECONDS", 0.3)
    before = {path.name for path in tmp_path.rglob("*")}
    words = ["--hf-checkpoint", "hf", "--prompt-data", "p", "--num-rollout", "1", "--colocate", "--load", "l"]
    words += ["--rollout-batch-size", "2", "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "out")]
    weights = StartWeights(load="l", ref_load="l")
    settings = parse_train(words)
    checked = Checked(
        settings=settings, shape=Mock(), manifest=None, weights=weights, overrides={}, topology=None, num_engines=1
    )
    assert run(checked, Watch()) == 2
    said = capsys.readouterr().err
    assert said.startswith("slime-launch: --save") and f"in use by another run (process {holder.pid}" in said
    assert said.count("\n") == 1 and {path.name for path in tmp_path.rglob("*")} == before


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    """Else a run would empty the file that it leads to."""
    save, mine = tmp_path / "save", tmp_path / "mine"
    save.mkdir()
    mine.write_text("mine")
    (save / LOCK).symlink_to(mine)
    with pytest.raises(DataError, match="is not a regular file"), locked(save, check=lambda: None, seconds=0):
        pass
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": "3"}, {"checkpoint": 5}, {"checkpoint": "../iter_0000003"}, {"checkpoint": "/tmp"}, {"flags": []},
        {"source_state": None}, {"load": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_run_writes_is_refused(tmp_path, change):
    write_manifest(tmp_path, manifest(3))
    values = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(values | change))
    with pytest.raises(ManifestError, match=f"manifest.json is not a valid manifest .*{next(iter(change))}"):
        read_manifest(tmp_path)


def test_one_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ManifestError, match=r"is not a valid manifest .it is nested too deeply"):
        read_manifest(tmp_path)
