"""The command of runs with the generate function of `turns.py`."""

from __future__ import annotations

from pathlib import Path

from launching import Assets, train_command

TURNS = Path(__file__).with_name("turns.py")


def turns_command(assets: Assets, work: Path, *more: str, rollouts: int) -> list[str]:
    """A run whose samples come in several turns, in parts, and as texts."""
    own = ["--custom-generate-function-path", str(TURNS), "--max-turns", "3", "--rollout-max-response-len", "40"]
    how = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "40"]
    loss = ["--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-high", "4"]
    return train_command(assets, work, *own, *how, *loss, *more, rollouts=rollouts, save=False)
