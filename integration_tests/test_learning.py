"""The whole loop learns: SGLang, the router, Ray and Megatron-core on an easy task."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from launching import Assets, rows, run, train_command
from learning import ALGORITHMS, ALONE, GRPO, ON_TWO_RANKS, PPO, ROLLOUTS, STEPS, learn

EVERY = [pytest.param(name, marks=[] if name == ON_TWO_RANKS else [pytest.mark.full]) for name in ALGORITHMS]

STALENESS = 2


@pytest.mark.real
@pytest.mark.timeout(1800)
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
    of_policy = [step for step in steps if "train/loss" in step]  # the others train the critic alone
    assert of_policy == steps[2 * ALONE if name == PPO else 0 :]
    # The second steps are off-policy; the first compare the policy with itself, up to rounding.
    first_spread, second_spread = (max(step["train/ratio_std"] for step in of_policy[part::2]) for part in (0, 1))
    print(f"spread of the policy ratio: first steps {first_spread:.1e}, second steps {second_spread:.1e}")
    assert first_spread < 1e-3
    assert second_spread > 1e-2
    assert first < 0.3
    assert last > 0.6


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [GRPO, PPO])
def test_it_learns_from_older_tokens_as_well(qwen3: Assets, tmp_path: Path, name: str) -> None:
    held = ["--eval-prompt-data", "held", f"{qwen3.prompts}@[0:16]", "--eval-interval", "8"]
    beside = ["--async-buffer-size", "2", "--max-weight-staleness", str(STALENESS), "--use-tis"]
    learn(qwen3, tmp_path, name, *beside, *held, colocate=False)
    batches = rows(tmp_path, "rollout")[:ROLLOUTS]
    rewards = [row["rollout/raw_reward"] for row in batches]
    ages = [row["rollout/staleness/max"] for row in batches]
    evaluated = {row["rollout_id"]: row["eval/held"] for row in rows(tmp_path, "eval")}
    first, last = rewards[0], mean(rewards[-3:])
    print(f"{name}: mean reward {first:.3f}, at last {last:.3f}; held out {evaluated}; oldest tokens {ages}")
    assert 0 < max(ages) <= STALENESS
    assert first < 0.3
    assert last > 0.6
    assert len(evaluated) >= 3 and max(evaluated) >= 15
    assert evaluated[min(evaluated)] < 0.3 and evaluated[max(evaluated)] > 0.6


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_mean_reward_rises_from_chance_to_above_nine_tenths(qwen3: Assets, tmp_path: Path) -> None:
    run(train_command(qwen3, tmp_path, "--lr", "4e-3", rollouts=30, save=False), tmp_path / "log.txt")
    rewards = [row["rollout/raw_reward"] for row in rows(tmp_path, "rollout")]
    first, last = rewards[0], mean(rewards[-3:])
    print(f"mean reward: first rollout {first:.3f} (chance 0.125), last three {last:.3f}")
    assert first < 0.3
    assert last > 0.9
