"""PPO with a critic in the whole loop, and the same rollouts from files: the same numbers to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Assets, rows, run, train_command

ROLLOUTS, ALONE = 6, 2
PPO = ["--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--num-critic-only-steps", str(ALONE), "--lr", "2e-3"]
KEPT = ("train/", "rollout/")


def numbers(work: Path) -> list[dict[str, float]]:
    """Metrics of every step and rollout, without wall time."""
    return [
        {name: value for name, value in row.items() if name.startswith(KEPT)}
        for kind in ("train", "rollout")
        for row in rows(work, kind)
    ]


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(600)
def test_ppo_and_the_same_from_files(qwen3: Assets, tmp_path: Path) -> None:
    roles = tmp_path / "roles.yaml"
    roles.write_text("megatron: [{role: critic, overrides: {lr: 5e-3, clip_grad: 5}}]")
    flags = [*PPO, "--megatron-config-path", str(roles)]
    template = f"{tmp_path}/recorded/{{rollout_id}}.npz"
    live, again = tmp_path / "live", tmp_path / "again"
    command = train_command(qwen3, live, *flags, "--save-debug-rollout-data", template, rollouts=ROLLOUTS)
    run(command, live / "train.txt")
    steps = rows(live, "train")
    assert all(row["train/critic-value_loss"] > 0 and row["train/critic-grad_norm"] > 0 for row in steps)
    assert [("train/loss" in row) for row in steps] == [False] * ALONE + [True] * (ROLLOUTS - ALONE)
    assert {row["train/critic-lr"] for row in steps} == {5e-3}
    assert (live / "save" / "critic" / f"iter_{ROLLOUTS:07d}" / ".metadata").is_file()

    command = train_command(qwen3, again, *flags, "--load-debug-rollout-data", template, rollouts=ROLLOUTS)
    run(command, again / "train.txt")
    assert numbers(again) == numbers(live)
