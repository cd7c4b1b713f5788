"""The command of the runs that `test_resume.py` compares."""

from __future__ import annotations

from pathlib import Path

from launching import Assets, train_command

ROLLOUTS = 5


def saving_command(assets: Assets, work: Path, *more: str, rollouts: int = ROLLOUTS) -> list[str]:
    """A run on shuffled prompts that writes a checkpoint every second rollout."""
    return train_command(assets, work, "--save-interval", "2", "--rollout-shuffle", *more, rollouts=rollouts)
