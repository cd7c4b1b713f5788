import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import discounted_returns, gae_advantages, returns, token_rewards

LENGTHS = st.lists(st.integers(0, 6), max_size=6)
LONG = [0, 1, 23, 24, 25, 48, 3072, 3073, 0, 40]


def batch(lengths, seed, share=0.7):
    """Rewards [N], token numbers [T] that are NaN where masked, and the mask; about a quarter is wholly masked."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    numbers = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    mask = (torch.rand(sum(lengths), generator=generator) < share).long()
    whole = torch.rand(len(lengths), generator=generator) > 0.25
    mask *= whole.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return rewards, numbers.masked_fill(mask == 0, torch.nan), mask


def spans(lengths):
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def rewards_by_a_loop(rewards, kl, mask, lengths, kl_coef):
    result = [0.0] * len(mask)
    for number, span in enumerate(spans(lengths)):
        trained = [t for t in span if mask[t]]
        for t in trained:
            result[t] = -kl_coef * kl[t].item()
        if trained:
            result[trained[-1]] += rewards[number].item()
    return result


def returns_by_a_loop(rewards, mask, lengths, gamma):
    """Hu 2025: G_t = r_t + γ G_{t+1}, from the end, over the trained tokens."""
    result = [0.0] * len(mask)
    for span in spans(lengths):
        following = 0.0
        for t in reversed(span):
            if mask[t]:
                result[t] = following = rewards[t].item() + gamma * following
    return result


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.3, -1.0]))
def test_token_rewards_are_those_of_a_loop(lengths, seed, kl_coef):
    rewards, kl, mask = batch(lengths, seed)
    ours = token_rewards(rewards_N=rewards, mask_T=mask, lengths=lengths, kl_T=kl, kl_coef=kl_coef)
    assert ours.tolist() == pytest.approx(rewards_by_a_loop(rewards, kl, mask, lengths, kl_coef), abs=1e-14)


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_are_those_of_a_loop(lengths, seed, gamma):
    _, rewards, mask = batch(lengths, seed)
    ours = discounted_returns(rewards_T=rewards, mask_T=mask, lengths=lengths, gamma=gamma)
    assert ours.tolist() == pytest.approx(returns_by_a_loop(rewards, mask, lengths, gamma), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("share", [0.6, 2.0])
def test_returns_of_long_responses(gamma, share):
    """Lengths around one, two and three levels of chunks."""
    _, rewards, mask = batch(LONG, 3, share)
    ours = discounted_returns(rewards_T=rewards, mask_T=mask, lengths=LONG, gamma=gamma)
    assert ours.tolist() == pytest.approx(returns_by_a_loop(rewards, mask, LONG, gamma), rel=1e-12, abs=1e-12)


def test_the_reward_is_on_the_last_trained_token_and_is_discounted_per_trained_token():
    mask = torch.tensor([1, 0, 0, 1, 0])  # an environment wrote in between and behind
    rewards = token_rewards(rewards_N=torch.tensor([2.0]), mask_T=mask, lengths=[5])
    assert rewards.tolist() == [0, 0, 0, 2, 0]
    assert discounted_returns(rewards_T=rewards, mask_T=mask, lengths=[5], gamma=0.5).tolist() == [1, 0, 0, 2, 0]


def test_types_gradient_and_what_is_not_looked_at():
    rewards = torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)
    ones = torch.ones(2, dtype=torch.bool)
    ours = token_rewards(rewards_N=rewards, mask_T=ones, lengths=[2], kl_T=torch.full((2,), math.nan), kl_coef=0.0)
    assert ours.dtype == torch.float32
    assert not ours.requires_grad
    assert ours.tolist() == [0, 1]
    returns = discounted_returns(rewards_T=rewards.expand(2), mask_T=ones, lengths=torch.tensor([2]))
    assert returns.dtype == torch.float32
    assert not returns.requires_grad


def test_bf16_adds_up_in_float64():
    rewards = torch.full((1000,), 1.0, dtype=torch.bfloat16)  # in bf16 the sum stops at 256
    returns = discounted_returns(rewards_T=rewards, mask_T=torch.ones(1000), lengths=[1000])
    assert returns.tolist() == list(range(1000, 0, -1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kl_coef": math.nan}, ConfigError, "kl_coef nan must be a finite number"),
        ({"kl_T": None}, ConfigError, "kl_coef 0.1 needs the divergence"),
        ({"kl_T": torch.zeros(3)}, DataError, r"kl_T has shape \[3\], must be \[4\]"),
        ({"kl_T": torch.tensor([0, math.inf, 0, 0])}, DataError, "kl_T must be finite .* at token 1, one of 1"),
        ({"rewards_N": torch.zeros(3)}, DataError, r"rewards have shape \[3\] but there are 2 responses"),
        ({"rewards_N": torch.tensor([0, math.nan])}, DataError, r"not so for responses \[1\]"),
        ({"lengths": [2, 3]}, DataError, "add up to 5 but there are 4"),
    ],
)
def test_what_token_rewards_refuse(change, error, message):
    given_ = {"rewards_N": torch.zeros(2), "mask_T": torch.ones(4), "lengths": [2, 2], "kl_T": torch.zeros(4)}
    with pytest.raises(error, match=message):
        token_rewards(**{**given_, "kl_coef": 0.1, **change})


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_gamma_is_a_discount(gamma):
    with pytest.raises(ConfigError, match=f"gamma {gamma} must be between 0 and 1"):
        discounted_returns(rewards_T=torch.zeros(1), mask_T=torch.ones(1), lengths=[1], gamma=gamma)


def test_what_returns_refuse():
    with pytest.raises(DataError, match=r"rewards_T has shape \[2\], must be \[1\]"):
        discounted_returns(rewards_T=torch.zeros(2), mask_T=torch.ones(1), lengths=[1])
    with pytest.raises(DataError, match="rewards_T must be finite where the mask is 1; got nan at token 2, one of 1"):
        discounted_returns(
            rewards_T=torch.tensor([math.nan, 0, math.nan]), mask_T=torch.tensor([0, 1, 1]), lengths=[1, 2]
        )


FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def gae_batch(lengths, seed, share=0.7, dtype=torch.float64):
    """Rewards and values that are NaN where masked, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(sum(lengths), generator=generator) < share).long()
    rewards, values = torch.randn(2, sum(lengths), dtype=dtype, generator=generator).masked_fill(mask == 0, torch.nan)
    return rewards, values, mask


def by_a_loop(rewards, values, mask, lengths, gamma, lambd):
    """Schulman et al. 2016, equations 11 and 16, from the end of each response, over its trained tokens."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    rewards, values, start = rewards.tolist(), values.tolist(), 0
    for length in lengths:
        following = next_value = 0.0
        for t in range(start + length - 1, start - 1, -1):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                advantages[t] = following = delta + gamma * lambd * following
                returns[t] = following + values[t]
                next_value = values[t]
        start += length
    return advantages, returns


def assert_as_a_loop(lengths, seed, gamma, lambd, share=0.7):
    rewards, values, mask = gae_batch(lengths, seed, share)
    ours = gae_advantages(rewards_T=rewards, values_T=values, mask_T=mask, lengths=lengths, gamma=gamma, lambd=lambd)
    for result, expected in zip(ours, by_a_loop(rewards, values, mask, lengths, gamma, lambd), strict=True):
        assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(LENGTHS, st.integers(0, 99), FACTORS, FACTORS)
def test_equals_a_loop(lengths, seed, gamma, lambd):
    assert_as_a_loop(lengths, seed, gamma, lambd)


@pytest.mark.parametrize("share", [0.6, 2.0])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.05, 0.02)])
def test_equals_a_loop_for_long_responses(gamma, lambd, share):
    """Lengths around one, two and three levels of chunks."""
    assert_as_a_loop(LONG, 5, gamma, lambd, share)


@pytest.mark.parametrize("shape", [(64, 8192), (256, 2048)])
@pytest.mark.full
def test_equals_a_loop_at_full_size(shape):
    count, longest = shape
    lengths = torch.randint(0, longest + 1, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_as_a_loop(lengths, 7, 0.999, 0.97)


def test_with_lambda_one_the_returns_are_the_discounted_rewards():
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.3, -2.0, 5.0])
    advantages, returns = gae_advantages(
        rewards_T=rewards, values_T=values, mask_T=torch.ones(3), lengths=[3], gamma=0.5
    )
    torch.testing.assert_close(returns, torch.tensor([0.25, 0.5, 1.0]))
    torch.testing.assert_close(advantages, returns - values)


@given(LENGTHS, st.integers(0, 99))
def test_a_response_alone_gives_the_same(lengths, seed):
    rewards, values, mask = gae_batch(lengths, seed)
    together, _ = gae_advantages(rewards_T=rewards, values_T=values, mask_T=mask, lengths=lengths, lambd=0.9)
    parts = zip(*(tensor.split(lengths) for tensor in (rewards, values, mask)), strict=True)
    alone = [gae_advantages(rewards_T=r, values_T=v, mask_T=m, lengths=[len(m)], lambd=0.9)[0] for r, v, m in parts]
    torch.testing.assert_close(together, torch.cat([*alone, together[:0]]), rtol=1e-13, atol=1e-13)


def test_nothing_leaks_from_huge_values_next_door():
    values = torch.tensor([1e30, -1e30, 0.25, 0.5])
    advantages, _ = gae_advantages(
        rewards_T=torch.zeros(4), values_T=values, mask_T=torch.ones(4), lengths=[2, 2], gamma=1.0, lambd=1.0
    )
    assert advantages[2:].tolist() == [-0.25, -0.5]


@pytest.mark.parametrize("limit", [1, 40, 64, 2000])
def test_a_cpu_works_block_by_block(limit, monkeypatch):
    monkeypatch.setattr(returns, "CPU_BLOCK", limit)
    taken = returns.blocks(torch.tensor(LONG))
    for tokens, sequences in taken:
        assert tokens == slice(sum(LONG[: sequences.start]), sum(LONG[: sequences.stop]))
        assert tokens.stop - tokens.start <= limit or len(LONG[sequences]) == 1
    assert [n for _, sequences in taken for n in range(*sequences.indices(len(LONG)))] == list(range(len(LONG)))
    assert_as_a_loop(LONG, 5, 0.99, 0.95)
    values = torch.zeros(sum(LONG))
    values[-3] = torch.nan
    with pytest.raises(DataError, match=f"at token {sum(LONG) - 3}, one of 1"):
        gae_advantages(
            rewards_T=torch.zeros(len(values)), values_T=values, mask_T=torch.ones(len(values)), lengths=LONG
        )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths):
    nothing = torch.zeros(0)
    advantages, returns = gae_advantages(rewards_T=nothing, values_T=nothing, mask_T=nothing, lengths=lengths)
    assert advantages.shape == returns.shape == (0,)


def test_type_and_gradient():
    values = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    for result in gae_advantages(
        rewards_T=torch.ones(2, dtype=torch.float16), values_T=values, mask_T=torch.ones(2), lengths=[2]
    ):
        assert result.dtype == torch.float32
        assert not result.requires_grad
    assert values.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": 1.5}, ConfigError, "gamma 1.5 must be between 0 and 1"),
        ({"lambd": math.nan}, ConfigError, "lambd nan must be between 0 and 1"),
        ({"values_T": torch.zeros(3)}, DataError, r"values_T has shape \[3\], must be \[2\]"),
        ({"rewards_T": torch.zeros(3)}, DataError, r"rewards_T has shape \[3\], must be \[2\]"),
        ({"values_T": torch.tensor([0.0, math.inf])}, DataError, "values_T must be finite .* inf at token 1"),
        ({"rewards_T": torch.tensor([math.nan, 0.0])}, DataError, "rewards_T must be finite .* nan at token 0"),
        ({"lengths": [1]}, DataError, "add up to 1 but there are 2"),
    ],
)
def test_what_it_refuses(change, error, message):
    given_ = {"rewards_T": torch.zeros(2), "values_T": torch.zeros(2), "mask_T": torch.ones(2), "lengths": [1, 1]}
    with pytest.raises(error, match=message):
        gae_advantages(**{**given_, **change})
