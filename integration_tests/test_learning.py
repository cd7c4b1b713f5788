"""The whole loop learns: SGLang, the router, Ray and Megatron-core on an easy task."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from launching import Assets, rows, run, train_command


@pytest.mark.real
@pytest.mark.timeout(400)
def test_mean_reward_rises_from_chance_to_above_nine_tenths(qwen3: Assets, tmp_path: Path) -> None:
    command = train_command(qwen3, tmp_path, "--lr", "4e-3", rollouts=40, save=False)
    run(command, tmp_path / "log.txt", seconds=380)
    rewards = [row["rollout/raw_reward"] for row in rows(tmp_path, "rollout")]
    first, last = rewards[0], mean(rewards[-3:])
    print(f"mean reward: first rollout {first:.3f} (chance 0.125), last three {last:.3f}")
    assert first < 0.3
    assert last > 0.9
