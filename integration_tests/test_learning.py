"""The whole loop learns: SGLang, the router, Ray and Megatron-core on an easy task."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from cluster import Joined
from launching import Assets, rows
from learning import ALGORITHMS, ON_TWO_RANKS, ROLLOUTS, STEPS, learn

EVERY = [pytest.param(name, marks=[] if name == ON_TWO_RANKS else [pytest.mark.full]) for name in ALGORITHMS]


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_learns_in_the_whole_loop(
    qwen3: Assets, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    ended = request.getfixturevalue("learned_run") if name == ON_TWO_RANKS else learn(qwen3, tmp_path, name)
    rewards = [row["rollout/raw_reward"] for row in rows(ended.work, "rollout")][:ROLLOUTS]
    steps = rows(ended.work, "train")[:STEPS]
    first, last = rewards[0], mean(rewards[-3:])
    print(f"{name}: mean reward of the first rollout {first:.3f} (chance 0.125), of the last three {last:.3f}")
    assert [step["rollout_id"] for step in steps] == [rollout_id for rollout_id in range(ROLLOUTS) for _ in range(2)]
    # The second steps are off-policy; the first compare the policy with itself, up to rounding.
    first_spread, second_spread = (max(step["train/ratio_std"] for step in steps[part::2]) for part in (0, 1))
    print(f"spread of the policy ratio: first steps {first_spread:.1e}, second steps {second_spread:.1e}")
    assert first_spread < 1e-3
    assert second_spread > 1e-2
    assert first < 0.3
    assert last > 0.6


@pytest.mark.real
@pytest.mark.timeout(400)
def test_mean_reward_rises_from_chance_to_above_nine_tenths(joined_run: Joined) -> None:
    rewards = [row["rollout/raw_reward"] for row in rows(joined_run.work, "rollout")]
    first, last = rewards[0], mean(rewards[-3:])
    print(f"mean reward: first rollout {first:.3f} (chance 0.125), last three {last:.3f}")
    assert first < 0.3
    assert last > 0.9
