import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError, DataError
from slime_core.ops import gae_advantages, returns

LENGTHS = st.lists(st.integers(0, 6), max_size=6)
LONG = [0, 1, 23, 24, 25, 48, 3072, 3073, 0, 40]
FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def batch(lengths, seed, share=0.7, dtype=torch.float64):
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
    rewards, values, mask = batch(lengths, seed, share)
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
    rewards, values, mask = batch(lengths, seed)
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
