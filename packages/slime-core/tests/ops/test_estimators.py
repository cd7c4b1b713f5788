import math

import pytest
import torch

from slime_core.config import ESTIMATORS, AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    estimator_named,
    gae_advantages,
    policy_advantages,
    token_rewards,
    whiten,
)

REWARDS = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
MASK = torch.tensor([1, 0, 1, 0, 0, 1])  # the second response is wholly masked
LENGTHS = torch.tensor([3, 2, 1])
KL = torch.tensor([0.1, math.nan, 0.4, math.nan, math.nan, -0.2], dtype=torch.float64)
VALUES = torch.tensor([0.3, math.nan, -0.1, math.nan, math.nan, 1.0], dtype=torch.float64)


def inputs(kl_coef=0.5, **change):
    given = {"rewards_N": REWARDS, "mask_T": MASK, "lengths_N": LENGTHS, "kl_T": KL, "values_T": VALUES}
    return AdvantageInputs(**{**given, "kl_coef": kl_coef, **change})


def found(estimator, kl_coef=0.5, whitened=False, **change):
    """What an estimator makes of the inputs, by way of the settings; the reference is such that k1 is the KL."""
    given = {"rewards_N": REWARDS, "mask_T": MASK, "lengths": LENGTHS, "old_log_probs_T": KL, "values_T": VALUES}
    given = {**given, "ref_log_probs_T": torch.zeros_like(KL), **change}
    config = AlgorithmConfig(
        kl_coef=kl_coef, normalize_advantages=whitened, use_opd="teacher_log_probs_T" in change, opd_kl_coef=0.1
    )
    return policy_advantages(config, **given, estimator=estimator)


def expected(name, kl_coef):
    """By hand: each response's trained tokens as (reward, [kl], [value])."""
    result = []
    for reward, kls, values in ((0.5, [0.1, 0.4], [0.3, -0.1]), (2.0, [-0.2], [1.0])):
        tokens = [-kl_coef * kl for kl in kls]
        if name == "ppo":
            tokens[-1] += reward
            following = next_value = 0.0
            for t in reversed(range(len(tokens))):
                following = tokens[t] + 0.9 * next_value - values[t] + 0.9 * 0.8 * following
                next_value, tokens[t] = values[t], following
        elif name == "reinforce_plus_plus":
            tokens[-1] += reward
            for t in reversed(range(len(tokens) - 1)):
                tokens[t] += 0.9 * tokens[t + 1]
        else:
            tokens = [reward + token for token in tokens]
        result.append(tokens)
    (first, second), (third,) = result
    return [first, 0, second, 0, 0, third]


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_honours_the_reward_side_kl(name, kl_coef):
    advantages, returns = found(estimator_named(name, gamma=0.9, lambd=0.8), kl_coef)
    assert advantages.tolist() == pytest.approx(expected(name, kl_coef))
    critic = torch.tensor([0.3, 0, -0.1, 0, 0, 1.0]) if name == "ppo" else torch.zeros(6)
    assert returns.tolist() == pytest.approx((advantages + critic).tolist())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_takes_a_rank_with_nothing(name):
    nothing = torch.zeros(0)
    empty = dict.fromkeys(("rewards_N", "mask_T", "old_log_probs_T", "ref_log_probs_T", "values_T"), nothing)
    advantages, returns = found(estimator_named(name), 1.0, whitened=True, lengths=nothing.long(), **empty)
    assert advantages.shape == returns.shape == (0,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_micro_batches_change_nothing(name):
    estimator = estimator_named(name, gamma=0.9, lambd=0.8)
    whole = found(estimator)
    parts, start = [], 0
    for number, length in enumerate(LENGTHS.tolist()):
        span = slice(start, start + length)
        alone = {"rewards_N": REWARDS[number : number + 1], "lengths": LENGTHS[number : number + 1]}
        tokens = {"mask_T": MASK[span], "old_log_probs_T": KL[span], "values_T": VALUES[span]}
        parts.append(found(estimator, **alone, **tokens, ref_log_probs_T=torch.zeros(length, dtype=torch.float64)))
        start += length
    for field in range(2):
        torch.testing.assert_close(torch.cat([part[field] for part in parts]), whole[field], rtol=1e-12, atol=1e-12)


def test_distillation_comes_before_whitening_and_leaves_the_returns():
    student = torch.tensor([-1.0, math.nan, -2.0, math.nan, math.nan, -3.0], dtype=torch.float64)
    teacher = torch.tensor([-1.5, math.nan, -1.0, math.nan, math.nan, -3.0], dtype=torch.float64)
    estimator, given = estimator_named("ppo", gamma=0.9, lambd=0.8), {"old_log_probs_T": student}
    bare = found(estimator, **given, ref_log_probs_T=student - KL)
    advantages, returns = found(
        estimator, whitened=True, **given, ref_log_probs_T=student - KL, teacher_log_probs_T=teacher
    )
    added = bare.advantages_T - 0.1 * torch.tensor([0.5, 0, -1.0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages, whiten(added, MASK))
    torch.testing.assert_close(returns, bare.returns_T)


def mean_reward_estimator(given: AdvantageInputs, /) -> Advantages:
    """Somebody's own: a token's share of its response's reward."""
    rewards = token_rewards(rewards_N=given.rewards_N, mask_T=given.mask_T, lengths=given.lengths_N)
    return Advantages(rewards / 2, rewards.masked_fill(given.mask_T == 0, torch.nan))


def test_ones_own_function_takes_the_place_of_a_built_in_one():
    own: AdvantageEstimator = mean_reward_estimator
    advantages, returns = found(own)
    assert advantages.tolist() == [0, 0, 0.25, 0, 0, 1]
    assert returns.tolist() == [0, 0, 0.5, 0, 0, 2]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Advantages(torch.zeros(5), torch.zeros(6)), r"advantages_T has shape \[5\], must be \[6\]"),
        (Advantages(torch.zeros(6), torch.zeros(6, 1)), r"returns_T has shape \[6, 1\], must be \[6\]"),
        (Advantages(torch.zeros(6).long(), torch.zeros(6)), "advantages_T has type torch.int64"),
        (Advantages(torch.full((6,), math.nan), torch.zeros(6)), "advantages_T must be finite .* token 0, one of 3"),
    ],
)
def test_an_estimator_that_breaks_its_contract(result, message):
    with pytest.raises(DataError, match=message):
        found(lambda given: result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_T": MASK.unsqueeze(1)}, r"mask_T has shape \[6, 1\], must be \[6\]"),
        ({"rewards_N": torch.tensor([0.0, math.nan, 1.0])}, r"not so for responses \[1\]"),
        ({"rewards_N": REWARDS[:2]}, r"rewards have shape \[2\] but there are 3 responses"),
        ({"lengths_N": LENGTHS + 1}, "add up to 9 but there are 6"),
        ({"kl_T": KL[:3]}, r"kl_T has shape \[3\]"),
        ({"values_T": VALUES[:3]}, r"values_T has shape \[3\]"),
    ],
)
def test_inputs_that_do_not_fit(change, message):
    with pytest.raises(DataError, match=message):
        inputs(**change)


def test_bad_settings():
    with pytest.raises(DataError, match="ppo needs the critic's values"):
        found(estimator_named("ppo"), values_T=None)
    with pytest.raises(ConfigError, match="a2c is unknown; allowed: grpo, gspo"):
        estimator_named("a2c")
    with pytest.raises(ConfigError, match="gamma 2 must be between 0 and 1"):
        estimator_named("reinforce_plus_plus", gamma=2)
    with pytest.raises(ConfigError, match="lambd -1 must be between 0 and 1"):
        estimator_named("ppo", lambd=-1)


def test_ppo_is_gae_of_the_token_rewards():
    rewards = token_rewards(rewards_N=REWARDS, mask_T=MASK, lengths=LENGTHS, kl_T=KL, kl_coef=0.5)
    ours = found(estimator_named("ppo", gamma=0.9, lambd=0.8))
    for mine, direct in zip(
        ours,
        gae_advantages(rewards_T=rewards, values_T=VALUES, mask_T=MASK, lengths=LENGTHS, gamma=0.9, lambd=0.8),
        strict=True,
    ):
        torch.testing.assert_close(mine, direct)


@pytest.mark.parametrize("mask", [MASK, torch.ones(6)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_callers_tensors_stay_as_they_were(name, mask):
    log_probs = torch.arange(6, dtype=torch.float64)
    given = {"rewards_N": REWARDS, "mask_T": mask, "lengths": LENGTHS, "values_T": VALUES.nan_to_num()}
    given |= {"old_log_probs_T": log_probs, "ref_log_probs_T": log_probs - KL.nan_to_num()}
    before = {key: tensor.clone() for key, tensor in given.items()}
    first = found(estimator_named(name), 1.0, **given)
    kept = first.advantages_T.clone()
    found(lambda _: first, 1.0, whitened=True, **given, teacher_log_probs_T=log_probs / 2)
    whiten(first.advantages_T, MASK)
    assert first.advantages_T.equal(kept)
    assert all(given[key].equal(before[key]) for key in given)
