import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime_launch.errors import ManifestError
from slime_launch.manifest import Manifest, read_manifest, write_manifest


def manifest(iteration: int, checkpoint: str | None = None, padding: int = 0) -> Manifest:
    return Manifest(
        iteration=iteration,
        weight_version=iteration,
        checkpoint=checkpoint,
        source_state={"position": iteration, "padding": "x" * padding},
        flags={"lr": 1e-6, "eval_prompt_data": ["a", "b"]},
        output_dir="out",
        load="dist/release",
        ref_load="dist/release",
    )


def test_round_trip(tmp_path):
    (tmp_path / "iter_0000003").mkdir()
    write_manifest(tmp_path, manifest(3, "iter_0000003"))
    assert read_manifest(tmp_path) == manifest(3, "iter_0000003")


def test_none_is_none(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "nowhere") is None


def test_a_half_written_one_is_ignored(tmp_path):
    write_manifest(tmp_path, manifest(1))
    (tmp_path / ".manifest.json.partial").write_text('{"format_version": 1, "iter')
    assert read_manifest(tmp_path) == manifest(1)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 2, "iteration": 3}'])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError, match="is no manifest"):
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
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_manifest import manifest
from slime_launch.manifest import write_manifest
for iteration in range(1, 1_000_000):
    write_manifest(Path(sys.argv[1]), manifest(iteration, padding=200_000))
    print(iteration, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_manifest(tmp_path):
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
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
