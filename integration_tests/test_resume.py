"""A run that was killed goes on as if nothing had happened, to the last bit in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Assets, rows, run, started, train_command, tree, wait_for, wait_until_gone

ROLLOUTS = 5
GONE_SECONDS = 30.0


@pytest.mark.real
@pytest.mark.timeout(600)
def test_killed_run_continues_with_the_losses_of_one_that_was_never_stopped(llama: Assets, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ("--save-interval", "2", "--rollout-shuffle")
    run(train_command(llama, whole, *flags, rollouts=ROLLOUTS), whole / "log.txt")

    command = train_command(llama, cut, *flags, rollouts=ROLLOUTS)
    with started(command, cut / "log.txt") as process:
        # Three rollouts are trained on, two of them are in the checkpoint: the third must be made good.
        wait_for(lambda: len(rows(cut, "train")) >= 3, "the third step", process=process, log=cut / "log.txt")
        family = tree(process)
        process.kill()
        process.wait(10)
    left = wait_until_gone(family, GONE_SECONDS)
    assert not left, left
    text = run(command, cut / "log2.txt")

    expected, got = rows(whole, "train"), rows(cut, "train")
    print("losses never stopped: ", [row["train/loss"] for row in expected])
    print("losses killed, resumed:", [row["train/loss"] for row in got])
    assert [row["rollout_id"] for row in got] == list(range(ROLLOUTS))
    assert "continu" in text
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in got] == [row[name] for row in expected]
    versions = [(row["rollout/weight_version/min"], row["rollout/weight_version/max"]) for row in rows(cut, "rollout")]
    assert versions == [(rollout_id, rollout_id) for rollout_id in range(ROLLOUTS)]
    rewards = [[row["rollout/raw_reward"] for row in rows(work, "rollout")] for work in (whole, cut)]
    assert rewards[0] == rewards[1]
