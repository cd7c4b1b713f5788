"""A loss and an estimator that nobody has, planted as a row each before anything looks at the tables.

Then flags, checks, plans and trainers know them. Run as a program: the tables are read when modules are imported.
"""
# ruff: noqa: E402  (rows come before whoever looks at them)

from slime_core import algorithms
from slime_core.algorithms import EstimatorType, LossType

algorithms.LOSSES["margin_loss"] = LossType(
    name="margin_loss",
    help="a loss of margins",
    trains_on="pairs",
    value_head=True,
    has_reference=True,
    settings=("dpo_beta",),
    programs=("margin",),
)
algorithms.ADVANTAGE_ESTIMATORS["halves"] = EstimatorType(
    name="halves",
    estimate="halved",
    needs_critic=True,
    is_whitened=True,
    token_loss="halved",
    settings=("gamma",),
    ignores=("eps_clip_c",),
    paper_bounds="--eps-clip 0.1",
    paper_sums=True,
)

import torch

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.flags import flag_specs
from slime_core.ops import Advantages, advantages, estimator_named, objective, policy_objective
from slime_core.rewards import estimator_rewards
from slime_launch import migrate
from slime_launch.flags import read_anywhere
from slime_launch.new_task import gpus
from slime_megatron.service import check_algorithm
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.step.losses import LOSSES, LossFunction, loss_of

WORDS = ["--hf-checkpoint", "m", "--load", "c", "--num-rollout", "1", "--rollout-batch-size", "8", "--bf16"]
SPECS = {spec.dest: spec for spec in flag_specs(AlgorithmConfig)}


def refused(what, *asked, **settings):
    """The message with which something is refused."""
    try:
        what(*asked, **settings)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{asked} {settings} is not refused")


def problems(*words):
    """What is wrong with a command, and its settings."""
    settings, found = read_anywhere([*WORDS, *words])
    return found, settings


def check_loss():
    assert "margin_loss" in SPECS["loss_type"].choices
    assert "DPO, a reward model's loss or a loss of margins of preference pairs" in SPECS["loss_type"].help
    asked = ("--prompt-data", "rows.jsonl", "--loss-type", "margin_loss")
    found, settings = problems(*asked, "--dpo-beta", "0.2", "--chosen-key", "good", "--allow-left-out")
    assert not [line for line in found if "no effect" in line or "unknown" in line], found
    assert (settings.kind.rows, settings.samples_per_prompt, settings.megatron.micro_batch_size) == ("pairs", 2, 2)
    assert settings.algorithm.on_data and settings.algorithm.needs_reference and not settings.kind.generates
    for flag in ("--calculate-per-token-loss", "--dpo-reference-free", "--entropy-coef 0.1", "--loss-mask-type qwen"):
        found, _ = problems(*asked, *flag.split())
        assert any(line.startswith(flag) and "no effect" in line for line in found), (flag, found)
    assert gpus({"loss-type": "margin_loss", "rollout-num-gpus": 4}) == "1 GPU"
    assert migrate._loss("trl margin") == "margin_loss"
    algorithm = AlgorithmConfig(loss_type="margin_loss")
    assert "--loss-type margin_loss a new head" in refused(check_algorithm, algorithm, MegatronConfig(lora_rank=8))
    LOSSES["margin_loss"] = LossFunction.of(algorithm.loss, lambda inputs: (inputs.values_N.sum(), {}))
    assert loss_of(algorithm).scores


def check_estimator():
    assert "halves" in SPECS["advantage_estimator"].choices
    assert "(ppo, reinforce_plus_plus, halves)" in SPECS["gamma"].help
    asked = {"advantage_estimator": "halves"}
    assert "halves is defined with whitened advantages" in refused(AlgorithmConfig, **asked)
    asked["normalize_advantages"] = True
    config = AlgorithmConfig(**asked, gamma=0.5, value_clip=0.1)
    assert config.needs_critic and not config.compares_samples and not config.zero_rewards_add_nothing
    assert [line.split()[0] for line in config.notices] == ["halves", "halves"]
    for unused in ({"lambd": 0.5}, {"eps_clip_c": 1.5}):
        assert "no effect" in refused(AlgorithmConfig, **asked, **unused)
    advantages.ESTIMATES["halved"] = lambda inputs, gamma: Advantages(inputs.mask_T * gamma, inputs.mask_T)
    inputs = advantages.AdvantageInputs(rewards_N=torch.ones(1), mask_T=torch.ones(2), lengths_N=torch.tensor([2]))
    assert estimator_named("halves", gamma=0.5)(inputs).advantages_T.tolist() == [0.5, 0.5]
    objective.TOKEN_LOSSES["halved"] = lambda config, given: (given.log_ratio_X / 2, given.log_ratio_X > 1)
    new, old = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -4.0])
    loss, _ = policy_objective(
        config, log_probs_T=new, old_log_probs_T=old, advantages_T=torch.ones(2), weights_T=torch.ones(2)
    )
    assert loss.item() == 1.5
    assert estimator_rewards("halves", [1.0, 0.0], [0, 0]) == [1.0, 0.0]


check_loss()
check_estimator()
