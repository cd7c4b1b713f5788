"""The whole loop learns: SGLang, the router, Ray and Megatron-core on an easy task."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from launching import Assets, rows, run, train_command

# Two optimizer steps per rollout, so that the policy leaves the one that sampled.
TWO_STEPS = ["--global-batch-size", "32", "--num-steps-per-rollout", "2", "--micro-batch-size", "32"]
TOKEN_LIMIT = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "200", "--balance-by-flops"]
WHITENED = ["--normalize-advantages"]
ALGORITHMS = {
    "reinforce++ baseline, KL in the reward, TIS, two ranks": [
        "--advantage-estimator", "reinforce_plus_plus_baseline", *WHITENED, "--kl-coef", "0.001", "--use-tis",
        *TOKEN_LIMIT, "--actor-num-gpus-per-node", "2",
    ],
    "gspo, mismatch metrics": ["--advantage-estimator", "gspo", "--eps-clip", "0.05", "--get-mismatch-metrics"],
    "cispo, per token": [
        "--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-high", "4", "--calculate-per-token-loss",
    ],
    "rloo, MIS": ["--advantage-estimator", "rloo", "--use-mis", "--mis-level", "sequence", "--mis-batch-normalize"],
    "reinforce++": ["--advantage-estimator", "reinforce_plus_plus", *WHITENED, "--use-opsm", "--opsm-delta", "0.1"],
    "Dr.GRPO, dual clip": ["--disable-grpo-std-normalization", "--loss-divisor", "6", "--eps-clip-c", "3"],
}  # fmt: skip
EVERY = [pytest.param(name, marks=[pytest.mark.full] if place else []) for place, name in enumerate(ALGORITHMS)]


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_learns_in_the_whole_loop(qwen3: Assets, tmp_path: Path, name: str) -> None:
    extra = ["--lr", "4e-3", *TWO_STEPS, *ALGORITHMS[name]]
    command = train_command(qwen3, tmp_path, *extra, "--kl-loss-coef", "0", rollouts=20, save=False)
    run(command, tmp_path / "log.txt", seconds=380)
    rewards = [row["rollout/raw_reward"] for row in rows(tmp_path, "rollout")]
    steps = rows(tmp_path, "train")
    first, last = rewards[0], mean(rewards[-3:])
    print(f"{name}: mean reward of the first rollout {first:.3f} (chance 0.125), of the last three {last:.3f}")
    assert len(steps) == 40
    # The second steps are off-policy; the first compare the policy with itself, up to rounding.
    first_spread, second_spread = (max(step["train/ratio_std"] for step in steps[part::2]) for part in (0, 1))
    print(f"spread of the policy ratio: first steps {first_spread:.1e}, second steps {second_spread:.1e}")
    assert first_spread < 1e-3
    assert second_spread > 1e-2
    assert first < 0.3
    assert last > 0.6


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
