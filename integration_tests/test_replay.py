"""A rollout of a run is trained on again from a checkpoint: equal to the last bit, unless something was changed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import LAUNCHER, RUN_SECONDS, Assets, run, train_command
from story import Story

from slime_rollout.store import RolloutStore

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]


def replay(directory: Path, step: int, code: int) -> str:
    words = [str(LAUNCHER), "replay", str(directory), "--step", str(step)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    return done.stdout


def test_a_rollout_of_a_run_that_was_killed_is_trained_on_again(story: Story) -> None:
    """With a user-defined reward, turns and estimator."""
    equal = "equal: trained again from checkpoint 2, steps 3 to 4 (rollout_id 2 to 3) are equal to the last bit"
    assert replay(story.work / "out", 4, 0).startswith(equal)


@pytest.mark.full  # what is other is named in a test of slime-launch, too
def test_a_sample_that_has_changed_since_is_named(story: Story) -> None:
    out = story.work / "out"
    with changed_sample(RolloutStore(story.work / "save" / "rollouts"), 2):
        text = replay(out, 3, 1)
    assert text.startswith("not equal: trained again from checkpoint 2, in step 3 (rollout_id 2) rollout_log_probs")
    assert "rollout_log_probs differs in 1 of " in text


@pytest.mark.full
def test_a_run_is_trained_again_from_its_beginning(llama: Assets, tmp_path: Path) -> None:
    flags = ["--save-interval", "2", "--keep-rollouts", "--lr-decay-style", "linear", "--min-lr", "1e-4"]
    run(train_command(llama, tmp_path, *flags, rollouts=3), tmp_path / "log.txt")
    out = tmp_path / "out"
    assert "trained again from checkpoint 2, step 3 (rollout_id 2) is equal to the last bit" in replay(out, 3, 0)
    assert "from the run's beginning, steps 1 to 2 (rollout_id 0 to 1) are equal to the last bit" in replay(out, 2, 0)


@pytest.mark.full
def test_the_last_interval_of_a_finished_run_is_trained_again_without_a_flag_for_it(
    llama: Assets, tmp_path: Path
) -> None:
    run(train_command(llama, tmp_path, "--save-interval", "2", rollouts=4), tmp_path / "log.txt")
    assert "from checkpoint 2, steps 3 to 4 (rollout_id 2 to 3) are equal" in replay(tmp_path / "out", 4, 0)
    words = [str(LAUNCHER), "replay", str(tmp_path / "out"), "--step", "2"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert refused.returncode == 2 and "so --step 3 to 4 can be" in refused.stderr


@contextmanager
def changed_sample(store: RolloutStore, number: int) -> Iterator[None]:
    """One log-prob of a rollout is another; afterwards it is what it was."""
    batch = store.read(number)
    values = batch.samples["rollout_log_probs"].values
    before = values.copy()
    values[len(values) // 2] += 1e-3
    store.write(batch)
    try:
        yield
    finally:
        values[:] = before
        store.write(batch)
