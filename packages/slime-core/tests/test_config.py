import dataclasses
import math
import re

import pytest

from slime_core.config import AlgorithmConfig, MisConfig, OffPolicyConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.flags import flag_specs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"advantage_estimator": "grop"}, "--advantage-estimator grop is unknown; allowed: grpo"),
        ({"kl_loss_type": "k9"}, "--kl-loss-type k9 is unknown; allowed: k1, k2, k3, low_var_kl"),
        ({"eps_clip": -0.1}, "--eps-clip -0.1 must be 0 or more"),
        ({"eps_clip_high": -1.0}, "--eps-clip-high -1.0 must be 0 or more"),
        ({"kl_loss_coef": -1e-3}, "--kl-loss-coef -0.001 must be 0 or more"),
        ({"kl_loss_coef": math.nan}, "--kl-loss-coef nan must be a finite number, 0 or more"),
        ({"eps_clip": math.inf}, "--eps-clip inf must be a finite number, 0 or more"),
        ({"entropy_coef": math.nan}, "--entropy-coef nan must be a finite number"),
        ({"value_clip": -0.2}, "--value-clip -0.2 must be 0 or more"),
        ({"kl_coef": math.inf}, "--kl-coef inf must be a finite number, 0 or more"),
        ({"opd_kl_coef": -1.0}, "--opd-kl-coef -1.0 must be 0 or more"),
        ({"gamma": 1.1}, "--gamma 1.1 must be between 0 and 1"),
        ({"lambd": math.nan}, "--lambd nan must be a finite number, between 0 and 1"),
        ({"eps_clip_c": 1.0}, "--eps-clip-c 1.0 must be above 1; 3 is usual"),
        ({"loss_divisor": 0.0}, "--loss-divisor 0.0 must be above 0; the largest response length is usual"),
        (
            {"advantage_estimator": "reinforce_plus_plus"},
            "--advantage-estimator reinforce_plus_plus is defined with whitened advantages; set --normalize-advantages",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline"},
            "reinforce_plus_plus_baseline is defined with whitened advantages; set --normalize-advantages",
        ),
        (
            {"kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2},
            "--kl-coef 0.1 and --kl-loss-coef 0.2 would count the KL divergence twice",
        ),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1"},
            "--kl-loss-type k1 as a loss has a mean gradient of 0, .*; give k3 or k2, or add --use-unbiased-kl",
        ),
        ({"use_unbiased_kl": True}, "--use-unbiased-kl has no effect without --use-kl-loss; give --use-kl-loss, or"),
        (
            {"calculate_per_token_loss": True, "loss_divisor": 9.0},
            "--calculate-per-token-loss and --loss-divisor 9.0 are two denominators of the loss; give one of them",
        ),
        (
            {"use_rollout_logprobs": True, "keep_old_actor": True},
            "--use-rollout-logprobs and --keep-old-actor both say what the policy is compared with; give one",
        ),
        (
            {"custom_pg_loss_reducer_function_path": "own.py:mean", "loss_divisor": 9.0},
            "--custom-pg-loss-reducer-function-path and --loss-divisor 9.0 both say how .*; give one of them",
        ),
        (
            {"advantage_estimator": "cispo", "eps_clip_c": 3.0},
            "--eps-clip-c 3.0 has no effect with --advantage-estimator cispo; leave one of them out",
        ),
        ({"tis_clip": -1.0}, "--tis-clip -1.0 must be 0 or more"),  # the settings of its parent count too
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        AlgorithmConfig(**values)
    assert isinstance(caught.value, SlimeError)


@pytest.mark.parametrize(
    ("values", "notice"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, r"--kl-loss-type is unset: k3; the upstream system's default, k1"),
        ({"use_kl_loss": True, "kl_loss_type": "k1"}, r"without --kl-loss-coef: the KL divergence is measured"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}, None),
        ({"kl_coef": 0.1}, None),
        ({}, None),
    ],
)
def test_what_a_user_may_not_expect_is_a_notice(values, notice):
    notices = AlgorithmConfig(**values).notices
    assert len(notices) == (notice is not None)
    assert all(re.search(notice, line) for line in notices)


def test_derived_values_and_immutability():
    assert AlgorithmConfig(eps_clip=0.1).clip_high == 0.1
    assert AlgorithmConfig(eps_clip=0.1, eps_clip_high=0.28).clip_high == 0.28
    assert AlgorithmConfig(use_kl_loss=True).needs_reference
    assert AlgorithmConfig(kl_coef=0.1).needs_reference
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(kl_coef=0.1).advantages_need_log_probs
    assert AlgorithmConfig(use_opd=True).advantages_need_log_probs
    assert not AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1).advantages_need_log_probs
    with pytest.raises(dataclasses.FrozenInstanceError):
        AlgorithmConfig().eps_clip = 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mis_level": "word"}, "--mis-level word is unknown; allowed: token, sequence, geometric"),
        ({"mis_mode": "drop"}, "--mis-mode drop is unknown; allowed: truncate, clip, mask, none"),
        ({"mis_rs_level": "word"}, "--mis-rs-level word is unknown"),
        ({"mis_upper_bound": 0.0}, "--mis-upper-bound 0.0 must be above 0"),
        ({"mis_rs_upper_bound": float("inf")}, "--mis-rs-upper-bound inf must be a finite number"),
        ({"mis_lower_bound": 3.0}, "--mis-lower-bound 3 must be at most --mis-upper-bound 2; set both"),
        ({"mis_upper_bound": 0.5}, "--mis-lower-bound 2 must be at most --mis-upper-bound 0.5; set both"),
        ({"mis_rs_lower_bound": -1.0}, "--mis-rs-lower-bound -1.0 must be 0 or more"),
        ({"mis_veto_threshold": 0.0}, "--mis-veto-threshold 0.0 must be above 0 and at most 1"),
        ({"mis_veto_threshold": 2.0}, "--mis-veto-threshold 2.0 must be above 0 and at most 1"),
    ],
)
def test_mis_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        MisConfig(**settings)


def test_a_lower_bound_left_out_is_the_inverse_of_the_upper():
    config = MisConfig(mis_upper_bound=4.0, mis_rs_level="token", mis_rs_upper_bound=1.25, mis_rs_lower_bound=0.0)
    assert config.bounds == (0.25, 4.0)
    assert config.rejection_bounds == (0.0, 1.25)


def test_every_setting_is_a_flag():
    names = [spec.name for spec in flag_specs(MisConfig)]
    assert names[:3] == ["--mis-level", "--mis-mode", "--mis-upper-bound"]
    assert len(names) == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tis_mode": "drop"}, "--tis-mode drop is unknown; allowed: truncate, icepop"),
        ({"tis_clip": 0.5, "tis_clip_low": 1.0}, "--tis-clip-low 1.0 must be at most --tis-clip 0.5"),
        ({"tis_clip_low": -0.5}, "--tis-clip-low -0.5 must be 0 or more"),
        ({"tis_clip": math.inf}, "--tis-clip inf must be a finite number, 0 or more"),
        ({"opsm_delta": -1.0}, "--opsm-delta -1.0 must be 0 or more"),
        ({"opsm_delta": math.nan}, "--opsm-delta nan must be"),
        ({"use_tis": True, "use_mis": True}, "--use-tis and --use-mis would weigh each token twice"),
        (
            {"use_rollout_logprobs": True, "use_mis": True},
            "--use-rollout-logprobs and --use-mis would both correct for the engine's log-probs; give one of them",
        ),
        ({"use_rollout_logprobs": True, "use_tis": True}, "--use-rollout-logprobs and --use-tis would both"),
        ({"mis_level": "word"}, "--mis-level word is unknown"),
    ],
)
def test_off_policy_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        OffPolicyConfig(**settings)


@pytest.mark.parametrize("switch", ["use_rollout_logprobs", "use_tis", "use_mis", "get_mismatch_metrics"])
def test_what_needs_the_engines_log_probs(switch):
    assert OffPolicyConfig(**{switch: True}).needs_rollout_log_probs


def test_opsm_takes_what_there_is():
    assert not OffPolicyConfig(use_opsm=True).needs_rollout_log_probs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"loss_type": "sft_loss", "use_kl_loss": True, "kl_loss_coef": 0.1},
            "--use-kl-loss, --kl-loss-coef 0.1 have no effect with --loss-type sft_loss; give --loss-type policy",
        ),
        (
            {"loss_type": "rm_loss", "loss_divisor": 2.0},
            "--loss-divisor 2.0 has no effect with --loss-type rm_loss; give",
        ),
        ({"dpo_beta": 0.3}, "--dpo-beta 0.3 has no effect with --loss-type policy_loss; give --loss-type dpo_loss"),
        ({"loss_type": "custom_loss"}, "--loss-type custom_loss needs --custom-loss-function-path"),
        (
            {"custom_loss_function_path": "a.py:b"},
            "no effect with --loss-type policy_loss; give --loss-type custom_loss",
        ),
        ({"disable_compute_advantages_and_returns": True}, "no effect with --loss-type policy_loss; leave one"),
    ],
)
def test_settings_of_another_loss_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        AlgorithmConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "compares"),
    [
        ({}, True),
        ({"advantage_estimator": "rloo", "use_kl_loss": True}, True),
        ({"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}, True),
        ({"advantage_estimator": "ppo"}, False),
        ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}, False),
        ({"disable_rewards_normalization": True}, False),
        ({"custom_advantage_function_path": "a.py:b"}, False),
        ({"kl_coef": 0.1}, False),
        ({"use_opd": True}, False),
        ({"loss_type": "dpo_loss"}, False),
    ],
)
def test_whether_equal_rewards_give_no_advantages(settings, compares):
    assert AlgorithmConfig(**settings).compares_samples is compares


def test_what_a_loss_needs():
    assert AlgorithmConfig(loss_type="dpo_loss").needs_reference
    assert not AlgorithmConfig(loss_type="dpo_loss", dpo_reference_free=True).needs_reference
    sft = AlgorithmConfig(loss_type="sft_loss", disable_compute_advantages_and_returns=True)
    assert not (sft.needs_reference or sft.needs_critic or sft.uses_advantages or sft.zero_rewards_add_nothing)
    own = AlgorithmConfig(loss_type="custom_loss", custom_loss_function_path="a.py:b", use_kl_loss=True)
    assert own.needs_reference and own.uses_advantages and not own.zero_rewards_add_nothing
