"""A run that was killed goes on as if nothing had happened, to the last bit in fp32."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ended import Ended, end_run, finish, send, trained
from launching import Assets, rows
from story import ROLLOUTS, story_command

from slime_launch.manifest import read_manifest

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]


def test_killed_run_continues_with_the_losses_of_one_that_was_never_stopped(
    whole_run: Ended, resumed_run: Ended
) -> None:
    assert_continued(whole_run, resumed_run)


@pytest.mark.full
def test_it_does_with_checkpoints_that_the_loop_waits_for(whole_run: Ended, llama: Assets, tmp_path: Path) -> None:
    """It is killed once the checkpoint of two rollouts counts, and trained on more."""
    command = story_command(llama, tmp_path, "--no-async-save", colocate=True)

    def ready() -> bool:
        manifest = read_manifest(tmp_path / "save")
        return manifest is not None and manifest.iteration >= 2 and trained(tmp_path, 3)()

    end_run(command, tmp_path, send(signal.SIGKILL), ready=ready)
    resumed = end_run(command, tmp_path, finish, ready=trained(tmp_path, ROLLOUTS), log="resumed.txt")
    assert_continued(whole_run, resumed)


def assert_continued(whole_run: Ended, resumed_run: Ended) -> None:
    expected, got = rows(whole_run.work, "train")[:ROLLOUTS], rows(resumed_run.work, "train")
    print("losses never stopped: ", [row["train/loss"] for row in expected])
    print("losses killed, resumed:", [row["train/loss"] for row in got])
    assert [row["rollout_id"] for row in got] == list(range(ROLLOUTS))
    assert resumed_run.code == 0, resumed_run.text[-4000:]
    assert "continu" in resumed_run.text
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in got] == [row[name] for row in expected]
    generated = rows(resumed_run.work, "rollout")
    versions = [(row["rollout/weight_version/min"], row["rollout/weight_version/max"]) for row in generated]
    assert versions == [(rollout_id, rollout_id) for rollout_id in range(ROLLOUTS)]
    never_stopped = rows(whole_run.work, "rollout")[:ROLLOUTS]
    assert [row["rollout/raw_reward"] for row in generated] == [row["rollout/raw_reward"] for row in never_stopped]
