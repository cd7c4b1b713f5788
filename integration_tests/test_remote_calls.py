"""A wrong method or argument in a call into a Ray actor is an error of mypy: some are planted in copies of files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MYPY = Path(sys.executable).with_name("mypy")
LAUNCH = "packages/slime-launch/src/slime_launch"
PLANTED = {
    f"{LAUNCH}/rollouts.py": [
        ("Batches.cancel)", "Batches.cansel)", r'"type\[Batches\]" has no attribute "cansel"'),
        ("RunEngines.confirm_update, version)", "RunEngines.confirm_update, [version])", "incompatible type"),
        ("RunEngines.begin_update, only_behind=", "RunEngines.begin_update, only_behin=", "keyword argument"),
        ("RolloutHost.held_out, iteration)", "RolloutHost.held_out)", "Missing positional argument"),
    ],
    f"{LAUNCH}/trainers.py": [
        (
            "TrainerWorker.export_mismatches)",
            "TrainerWorker.mislead)",
            r'"type\[TrainerWorker\]" has no attribute "mislead"',
        ),
        ("TrainerRank.push, update, channels)", "TrainerRank.push, update, 3)", "incompatible type"),
        ("TrainerWorker.save, iteration)", "TrainerRank.alive, iteration)", "Cannot infer value of type parameter"),
    ],
}


@pytest.mark.timeout(600)
def test_a_wrong_method_or_argument_of_a_remote_call_is_found(tmp_path: Path) -> None:
    command: list[str | Path] = [MYPY, "--no-error-summary", "--cache-dir", tmp_path / "cache"]
    expected = []
    for path, changes in PLANTED.items():
        text = (ROOT / path).read_text()
        for right, wrong, message in changes:
            assert text.count(right) == 1, right
            text = text.replace(right, wrong)
            number = text[: text.index(wrong)].count("\n") + 1
            expected.append((path, number, message))
        copy = tmp_path / Path(path).name
        copy.write_text(text)
        command += ["--shadow-file", path, copy]
    done = subprocess.run([*command, *PLANTED], cwd=ROOT, capture_output=True, text=True)
    for path, number, message in expected:
        assert re.search(rf"^{path}:{number}: error: .*(?:{message})", done.stdout, re.MULTILINE), done.stdout
