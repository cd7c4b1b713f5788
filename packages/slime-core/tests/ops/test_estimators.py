import math

import pytest
import torch

from slime_core.config import ESTIMATORS
from slime_core.errors import ConfigError, DataError
from slime_core.ops import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    Distillation,
    compute_advantages,
    estimator_named,
    gae_advantages,
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
    advantages, returns = compute_advantages(inputs(kl_coef), estimator_named(name, gamma=0.9, lambd=0.8))
    assert advantages.tolist() == pytest.approx(expected(name, kl_coef))
    critic = torch.tensor([0.3, 0, -0.1, 0, 0, 1.0]) if name == "ppo" else torch.zeros(6)
    assert returns.tolist() == pytest.approx((advantages + critic).tolist())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_takes_a_rank_with_nothing(name):
    nothing = torch.zeros(0)
    empty = AdvantageInputs(
        rewards_N=nothing, mask_T=nothing, lengths_N=nothing.long(), kl_T=nothing, kl_coef=1.0, values_T=nothing
    )
    advantages, returns = compute_advantages(empty, estimator_named(name), whitened=True)
    assert advantages.shape == returns.shape == (0,)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_micro_batches_change_nothing(name):
    estimator = estimator_named(name, gamma=0.9, lambd=0.8)
    whole = compute_advantages(inputs(), estimator)
    parts, start = [], 0
    for number, length in enumerate(LENGTHS.tolist()):
        span = slice(start, start + length)
        alone = inputs(
            rewards_N=REWARDS[number : number + 1],
            mask_T=MASK[span],
            lengths_N=LENGTHS[number : number + 1],
            kl_T=KL[span],
            values_T=VALUES[span],
        )
        parts.append(compute_advantages(alone, estimator))
        start += length
    for field in range(2):
        torch.testing.assert_close(torch.cat([part[field] for part in parts]), whole[field], rtol=1e-12, atol=1e-12)


def test_distillation_comes_before_whitening_and_leaves_the_returns():
    term = Distillation(
        student_log_probs_T=torch.tensor([-1.0, math.nan, -2.0, math.nan, math.nan, -3.0]),
        teacher_log_probs_T=torch.tensor([-1.5, math.nan, -1.0, math.nan, math.nan, -3.0]),
        coef=0.1,
    )
    estimator = estimator_named("ppo", gamma=0.9, lambd=0.8)
    bare = compute_advantages(inputs(), estimator)
    advantages, returns = compute_advantages(inputs(), estimator, distillation=term, whitened=True)
    added = bare.advantages_T - 0.1 * torch.tensor([0.5, 0, -1.0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(advantages, whiten(added, MASK))
    torch.testing.assert_close(returns, bare.returns_T)


def mean_reward_estimator(given: AdvantageInputs, /) -> Advantages:
    """Somebody's own: a token's share of its response's reward."""
    rewards = token_rewards(rewards_N=given.rewards_N, mask_T=given.mask_T, lengths=given.lengths_N)
    return Advantages(rewards / 2, rewards.masked_fill(given.mask_T == 0, torch.nan))


def test_ones_own_function_takes_the_place_of_a_built_in_one():
    own: AdvantageEstimator = mean_reward_estimator
    advantages, returns = compute_advantages(inputs(), own)
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
        compute_advantages(inputs(), lambda given: result)


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
        compute_advantages(inputs(values_T=None), estimator_named("ppo"))
    with pytest.raises(ConfigError, match="a2c is unknown; allowed: grpo, gspo"):
        estimator_named("a2c")
    with pytest.raises(ConfigError, match="gamma 2 must be between 0 and 1"):
        estimator_named("reinforce_plus_plus", gamma=2)
    with pytest.raises(ConfigError, match="lambd -1 must be between 0 and 1"):
        estimator_named("ppo", lambd=-1)


def test_ppo_is_gae_of_the_token_rewards():
    rewards = token_rewards(rewards_N=REWARDS, mask_T=MASK, lengths=LENGTHS, kl_T=KL, kl_coef=0.5)
    ours = compute_advantages(inputs(), estimator_named("ppo", gamma=0.9, lambd=0.8))
    for mine, direct in zip(
        ours,
        gae_advantages(rewards_T=rewards, values_T=VALUES, mask_T=MASK, lengths=LENGTHS, gamma=0.9, lambd=0.8),
        strict=True,
    ):
        torch.testing.assert_close(mine, direct)


@pytest.mark.parametrize("mask", [MASK, torch.ones(6)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_callers_tensors_stay_as_they_were(name, mask):
    given = {"rewards_N": REWARDS, "mask_T": mask, "lengths_N": LENGTHS, "kl_T": KL.nan_to_num(), "values_T": VALUES}
    given["values_T"] = VALUES.nan_to_num()
    log_probs = torch.arange(6, dtype=torch.float64)
    before = {key: tensor.clone() for key, tensor in given.items()}
    term = Distillation(student_log_probs_T=log_probs, teacher_log_probs_T=log_probs / 2, coef=1.0)
    first = compute_advantages(AdvantageInputs(**given, kl_coef=1.0), estimator_named(name))
    kept = first.advantages_T.clone()
    compute_advantages(AdvantageInputs(**given, kl_coef=1.0), lambda _: first, distillation=term, whitened=True)
    whiten(first.advantages_T, MASK)
    assert first.advantages_T.equal(kept)
    assert all(given[key].equal(before[key]) for key in given)
    assert log_probs.equal(torch.arange(6, dtype=torch.float64))
