import math
import statistics

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import ESTIMATORS, AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    distilled_advantages,
    estimator_named,
    gae_advantages,
    outcome_advantages,
    policy_advantages,
    token_rewards,
    whiten,
)


def test_what_outcome_advantages_refuse():
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(DataError, match=r"mask_T has shape \[2, 1\], must be \[2\]"):
        outcome_advantages(rewards_N=one, mask_T=torch.ones(2, 1), lengths=[2])
    with pytest.raises(DataError, match=r"rewards have shape \[2\] but there are 1 responses"):
        outcome_advantages(rewards_N=two, mask_T=two, lengths=[2])
    with pytest.raises(ConfigError, match=r"kl_coef 0.1 needs the divergence"):
        outcome_advantages(rewards_N=one, mask_T=two, lengths=[2], kl_coef=0.1)
    with pytest.raises(ConfigError, match="kl_coef nan must be a finite number"):
        outcome_advantages(rewards_N=one, mask_T=two, lengths=[2], kl_coef=torch.nan)
    with pytest.raises(DataError, match=r"kl_T must be finite .* at token 1"):
        outcome_advantages(rewards_N=one, mask_T=two, lengths=[2], kl_T=torch.tensor([0.0, torch.inf]), kl_coef=0.1)


LENGTHS = st.lists(st.integers(0, 5), max_size=5)


def batch(lengths, seed):
    """Rewards [N], two columns of token numbers [T] that are NaN where masked, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    mask = (torch.rand(sum(lengths), generator=generator) < 0.7).long()
    columns = torch.randn(3, sum(lengths), dtype=torch.float64, generator=generator)
    return rewards, columns.masked_fill(mask == 0, torch.nan), mask


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.2]))
def test_outcome_advantages_are_those_of_a_loop(lengths, seed, kl_coef):
    rewards, (kl, _, _), mask = batch(lengths, seed)
    ours = outcome_advantages(rewards_N=rewards, mask_T=mask, lengths=lengths, kl_T=kl, kl_coef=kl_coef)
    expected, tokens = [], iter(range(sum(lengths)))
    for number, length in enumerate(lengths):
        for _ in range(length):
            t = next(tokens)
            penalty = kl_coef * kl[t].item() if kl_coef else 0.0
            expected.append(rewards[number].item() - penalty if mask[t] else 0.0)
    assert ours.tolist() == pytest.approx(expected, abs=1e-14)


@given(st.integers(0, 9), st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
def test_distillation_adds_the_reverse_kl(length, seed, coef):
    _, (advantages, student, teacher), mask = batch([length], seed)
    ours = distilled_advantages(
        advantages_T=advantages, student_log_probs_T=student, teacher_log_probs_T=teacher, mask_T=mask, coef=coef
    )
    expected = [
        a - coef * (s - t) if m else 0.0
        for a, s, t, m in zip(advantages.tolist(), student.tolist(), teacher.tolist(), mask.tolist(), strict=True)
    ]
    assert ours.tolist() == pytest.approx(expected, abs=1e-14)


def test_advantages_are_constants():
    student = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    ours = distilled_advantages(
        advantages_T=torch.zeros(1, dtype=torch.bfloat16),
        student_log_probs_T=student,
        teacher_log_probs_T=torch.tensor([-0.5]),
        mask_T=torch.ones(1),
        coef=2.0,
    )
    assert not ours.requires_grad
    assert ours.dtype == torch.float32
    assert ours.tolist() == [1.0]


def test_what_distillation_refuses():
    given_ = {name: torch.zeros(2) for name in ("advantages_T", "student_log_probs_T", "teacher_log_probs_T")}
    with pytest.raises(ConfigError, match="distillation, inf, must be a finite number"):
        distilled_advantages(**given_, mask_T=torch.ones(2), coef=torch.inf)
    with pytest.raises(DataError, match=r"has shape \[2\], must be \[3\]"):
        distilled_advantages(**given_, mask_T=torch.ones(3), coef=1.0)
    with pytest.raises(DataError, match=r"mask_T has shape \[2, 1\], must be \[2\]"):
        distilled_advantages(**given_, mask_T=torch.ones(2, 1), coef=1.0)
    with pytest.raises(DataError, match=r"advantages_T must be finite .* got inf at token 1"):
        distilled_advantages(
            **{**given_, "advantages_T": torch.tensor([0.0, torch.inf])}, mask_T=torch.ones(2), coef=1.0
        )
    given_["teacher_log_probs_T"] = torch.tensor([0.0, -torch.inf])
    with pytest.raises(DataError, match=r"student_log_probs_T - teacher_log_probs_T must be finite .* at token 1"):
        distilled_advantages(**given_, mask_T=torch.ones(2), coef=1.0)


REWARDS = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
MASK = torch.tensor([1, 0, 1, 0, 0, 1])  # the second response is wholly masked
SPANS = torch.tensor([3, 2, 1])
KL = torch.tensor([0.1, math.nan, 0.4, math.nan, math.nan, -0.2], dtype=torch.float64)
VALUES = torch.tensor([0.3, math.nan, -0.1, math.nan, math.nan, 1.0], dtype=torch.float64)


def inputs(kl_coef=0.5, **change):
    given = {"rewards_N": REWARDS, "mask_T": MASK, "lengths_N": SPANS, "kl_T": KL, "values_T": VALUES}
    return AdvantageInputs(**{**given, "kl_coef": kl_coef, **change})


def found(estimator, kl_coef=0.5, whitened=False, **change):
    """What an estimator makes of the inputs, by way of the settings; the reference is such that k1 is the KL."""
    given = {"rewards_N": REWARDS, "mask_T": MASK, "lengths": SPANS, "old_log_probs_T": KL, "values_T": VALUES}
    given = {**given, "ref_log_probs_T": torch.zeros_like(KL), **change}
    distilled = {"use_opd": True, "opd_kl_coef": 0.1} if "teacher_log_probs_T" in change else {}
    config = AlgorithmConfig(kl_coef=kl_coef, normalize_advantages=whitened, **distilled)
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
    for number, length in enumerate(SPANS.tolist()):
        span = slice(start, start + length)
        alone = {"rewards_N": REWARDS[number : number + 1], "lengths": SPANS[number : number + 1]}
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
        ({"lengths_N": SPANS + 1}, "add up to 9 but there are 6"),
        ({"kl_T": KL[:3]}, r"kl_T has shape \[3\], must be \[6\]"),
        ({"values_T": VALUES[:3]}, r"values_T has shape \[3\], must be \[6\]"),
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
    rewards = token_rewards(rewards_N=REWARDS, mask_T=MASK, lengths=SPANS, kl_T=KL, kl_coef=0.5)
    ours = found(estimator_named("ppo", gamma=0.9, lambd=0.8))
    for mine, direct in zip(
        ours,
        gae_advantages(rewards_T=rewards, values_T=VALUES, mask_T=MASK, lengths=SPANS, gamma=0.9, lambd=0.8),
        strict=True,
    ):
        torch.testing.assert_close(mine, direct)


@pytest.mark.parametrize("mask", [MASK, torch.ones(6)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_callers_tensors_stay_as_they_were(name, mask):
    log_probs = torch.arange(6, dtype=torch.float64)
    given = {"rewards_N": REWARDS, "mask_T": mask, "lengths": SPANS, "values_T": VALUES.nan_to_num()}
    given |= {"old_log_probs_T": log_probs, "ref_log_probs_T": log_probs - KL.nan_to_num()}
    before = {key: tensor.clone() for key, tensor in given.items()}
    first = found(estimator_named(name), 1.0, **given)
    kept = first.advantages_T.clone()
    found(lambda _: first, 1.0, whitened=True, **given, teacher_log_probs_T=log_probs / 2)
    whiten(first.advantages_T, MASK)
    assert first.advantages_T.equal(kept)
    assert all(given[key].equal(before[key]) for key in given)


def by_a_loop(values, mask, eps=1e-8):
    kept = [v for v, m in zip(values.tolist(), mask.tolist(), strict=True) if m]
    if not kept:
        return [0.0] * len(values)
    mean = statistics.fmean(kept)
    variance = statistics.variance(kept) if len(kept) > 1 else 0.0
    return [(v - mean) / math.sqrt(variance + eps) if m else 0.0 for v, m in zip(values.tolist(), mask, strict=True)]


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), max_size=20))
def test_equals_a_loop(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    mask = torch.tensor([kept for _, kept in rows], dtype=torch.bool)
    ours = whiten(values.masked_fill(~mask, torch.nan), mask)
    assert ours.tolist() == pytest.approx(by_a_loop(values, mask), rel=1e-7, abs=1e-7)


def test_the_result_has_mean_0_and_the_corrected_variance_1():
    whitened = whiten(torch.tensor([3.0, 5.0, 100.0]), torch.tensor([1, 1, 0]))
    assert whitened.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0])


def test_eps_types_and_gradient():
    values = torch.tensor([0.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    whitened = whiten(values, torch.ones(2), eps=2.0)
    assert whitened.tolist() == [-0.5, 0.5]  # variance 2
    assert whitened.dtype == torch.float32
    assert not whitened.requires_grad


def test_what_it_refuses():
    for eps in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"eps \S+ must be a finite number above 0"):
            whiten(torch.ones(2), torch.ones(2), eps=eps)
    with pytest.raises(DataError, match=r"values_T has shape \[2\], must be \[3\]"):
        whiten(torch.zeros(2), torch.ones(3))
    with pytest.raises(DataError, match=r"mask_T has shape \[2, 1\], must be \[2\]"):
        whiten(torch.zeros(2), torch.ones(2, 1))
    for bad in (math.nan, math.inf, 1e200):
        with pytest.raises(DataError, match="must be finite where the mask is 1"):
            whiten(torch.tensor([bad, 0.0], dtype=torch.float64), torch.ones(2))


# name: (tokens of each rank, share of them that is masked, what is added to all)
CASES = {
    "uneven": ((13, 4), 0.3, 0.0),
    "empty rank": ((9, 0), 0.0, 0.0),
    "both empty": ((0, 0), 0.0, 0.0),
    "all masked on one": ((6, 5), None, 0.0),
    "one token": ((1, 0), 0.0, 0.0),
    "far from zero": ((50, 70), 0.2, 1e6),
}


def tokens(name):
    """All ranks' values, NaN where masked, and masks."""
    counts, masked, offset = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randn(sum(counts), generator=generator, dtype=torch.float64) + offset
    mask = torch.ones(sum(counts)) if masked is None else torch.rand(sum(counts), generator=generator) >= masked
    if masked is None:
        mask[counts[0] :] = 0
    return values.masked_fill(mask == 0, torch.nan), mask, counts


def run_case(rank, name):
    values, mask, counts = tokens(name)
    return whiten(values.split(counts)[rank], mask.split(counts)[rank], group=dist.group.WORLD)


def whitened_returns(rewards, mask, lengths, group=None):
    return policy_advantages(
        AlgorithmConfig(normalize_advantages=True), rewards_N=rewards, mask_T=mask, lengths=lengths,
        estimator=estimator_named("reinforce_plus_plus", gamma=0.9), group=group,
    ).advantages_T  # fmt: skip


def run_estimator(rank):
    """Three responses: two on the first rank, one on the second, or all on the second."""
    rewards, mask, lengths = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1, 1, 0, 1, 1, 0.0]), [2, 1, 3]
    results = []
    for cut in (2, 0):
        mine = slice(0, cut) if rank == 0 else slice(cut, 3)
        start = sum(lengths[: mine.start])
        mask_T = mask[start : start + sum(lengths[mine])]
        results.append(whitened_returns(rewards[mine], mask_T, torch.tensor(lengths[mine]).long(), dist.group.WORLD))
    return results


def refusal(rank):
    """A NaN on the second rank is an error on both."""
    try:
        whiten(torch.tensor([1.0, 2.0 if rank == 0 else torch.nan]), torch.ones(2), group=dist.group.WORLD)
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CASES)
def test_split_over_ranks_equals_whole(two_ranks, name):
    values, mask, counts = tokens(name)
    parts = two_ranks(__file__, "run_case", name)
    joined = torch.cat(parts)
    assert [len(part) for part in parts] == list(counts)
    assert joined.tolist() == pytest.approx(whiten(values, mask).tolist(), rel=1e-9, abs=1e-9)
    assert joined.tolist() == pytest.approx(by_a_loop(values, mask), rel=1e-7, abs=1e-7)


def test_advantages_are_whitened_alike_wherever_the_responses_lie(two_ranks):
    whole = whitened_returns(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1, 1, 0, 1, 1, 0.0]), [2, 1, 3])
    for parts in zip(*two_ranks(__file__, "run_estimator"), strict=True):
        joined = torch.cat(parts)
        torch.testing.assert_close(joined, whole, rtol=1e-6, atol=1e-6)


def test_a_nan_on_one_rank_is_an_error_on_every_rank(two_ranks):
    for message in two_ranks(__file__, "refusal"):
        assert "are [0.5, nan]" in message
