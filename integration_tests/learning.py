"""Algorithms, and runs that learn by them."""

from __future__ import annotations

import signal
from pathlib import Path

from ended import FOREVER, End, Ended, end_run, send, trained
from launching import Assets, train_command

CTRL_C = send(signal.SIGINT)
ROLLOUTS = 20
# Two optimizer steps per rollout, so that the policy leaves the one that sampled.
STEPS = 2 * ROLLOUTS
TWO_STEPS = ["--global-batch-size", "32", "--num-steps-per-rollout", "2", "--micro-batch-size", "32"]
TOKEN_LIMIT = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "200", "--balance-by-flops"]
WHITENED = ["--normalize-advantages"]
ON_TWO_RANKS = "reinforce++ baseline, KL in the reward, TIS, two ranks"
PPO, ALONE = "ppo, a critic that begins alone", 2
GRPO = "grpo"
ALGORITHMS = {
    ON_TWO_RANKS: [
        "--advantage-estimator", "reinforce_plus_plus_baseline", *WHITENED, "--kl-coef", "0.001", "--use-tis",
        *TOKEN_LIMIT, "--actor-num-gpus-per-node", "2", "--update-weight-transport", "gloo",
    ],
    "gspo, mismatch metrics, a pipeline": [
        "--advantage-estimator", "gspo", "--eps-clip", "0.05", "--get-mismatch-metrics",
        "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2",
    ],
    "cispo, per token, context parallel": [
        "--advantage-estimator", "cispo", "--eps-clip", "1", "--eps-clip-high", "4", "--calculate-per-token-loss",
        "--actor-num-gpus-per-node", "2", "--context-parallel-size", "2",
    ],
    "rloo, MIS": ["--advantage-estimator", "rloo", "--use-mis", "--mis-level", "sequence", "--mis-batch-normalize"],
    "reinforce++": ["--advantage-estimator", "reinforce_plus_plus", *WHITENED, "--use-opsm", "--opsm-delta", "0.1"],
    GRPO: ["--advantage-estimator", "grpo"],
    PPO: ["--advantage-estimator", "ppo", "--critic-lr", "1e-2", "--num-critic-only-steps", str(ALONE), *WHITENED],
    "Dr.GRPO, dual clip": ["--disable-grpo-std-normalization", "--loss-divisor", "6", "--eps-clip-c", "3"],
}  # fmt: skip


def learn(assets: Assets, work: Path, name: str, *more: str, colocate: bool = True, end: End = CTRL_C) -> Ended:
    """Train by an algorithm for `ROLLOUTS` rollouts, then press ctrl-c."""
    extra = ["--lr", "4e-3", *TWO_STEPS, *ALGORITHMS[name], "--kl-loss-coef", "0", *more]
    command = train_command(assets, work, *extra, rollouts=FOREVER, save=False, colocate=colocate)
    return end_run(command, work, end, ready=trained(work, STEPS))
