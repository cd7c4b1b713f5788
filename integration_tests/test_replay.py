"""A rollout of a run is trained on again from a checkpoint: equal to the last bit, unless something was changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launching import LAUNCHER, Assets, run, train_command

from slime_rollout.store import RolloutStore

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
SECONDS = 200


def replay(directory: Path, step: int, code: int) -> str:
    words = [str(LAUNCHER), "replay", str(directory), "--step", str(step)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_a_rollout_is_trained_on_again(llama: Assets, tmp_path: Path) -> None:
    flags = ["--save-interval", "2", "--keep-rollouts", "--lr-decay-style", "linear", "--min-lr", "1e-4"]
    run(train_command(llama, tmp_path, *flags, rollouts=3), tmp_path / "log.txt")
    out, store = tmp_path / "out", RolloutStore(tmp_path / "save" / "rollouts")
    assert "trained again from checkpoint 2: rollouts 2 to 2 are equal to the last bit" in replay(out, 2, 0)
    assert "from the run's beginning: rollouts 0 to 1 are equal to the last bit" in replay(out, 1, 0)
    batch = store.read(2)
    values = batch.samples["rollout_log_probs"].values
    values[len(values) // 2] += 1e-3
    store.write(batch)
    assert (
        "from checkpoint 2: in rollout 2 sample" in (text := replay(out, 2, 1)) and "rollout_log_probs differs" in text
    )
