"""The torch functions against plain Python integers and against the distribution that they should draw from."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_rollout.engine.sglang_flags import CPU_SHIMS

MASK = 0xFFFFFFFF


@pytest.fixture(scope="module")
def sampling():
    sys.path.insert(0, str(CPU_SHIMS))
    try:
        from slime_cpu_shims import sampling
    finally:
        sys.path.remove(str(CPU_SHIMS))
    return sampling


def murmur3(blocks):
    """MurmurHash3 x86_32 of 32-bit blocks, seed 0, in Python's integers."""

    def rotl(x, bits):
        return ((x << bits) | (x >> (32 - bits))) & MASK

    h = 0
    for block in blocks:
        k = rotl(block * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        h = (rotl(h ^ k, 13) * 5 + 0xE6546B64) & MASK
    h ^= 4 * len(blocks)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def test_the_reference_is_murmur3():
    # Published test vector: b"test" (one little-endian block) with seed 0.
    assert murmur3([int.from_bytes(b"test", "little")]) == 0xBA6BD213


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    columns=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
)
def test_hash_equals_the_reference(sampling, seed, position, columns):
    got = sampling.murmur_hash32(
        torch.tensor([seed]).view(torch.uint64), torch.tensor([position]), torch.tensor(columns)
    )
    assert got.dtype == torch.uint32
    assert got[0].tolist() == [murmur3([seed & MASK, seed >> 32 & MASK, position, column]) for column in columns]


def test_sample_is_the_gumbel_maximum_in_float64(sampling):
    torch.manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(5, 40), -1)
    got = sampling.multinomial_with_seed(logprobs, torch.arange(5), torch.full((5,), 7))
    for row in range(5):
        scores = []
        for column in range(40):
            uniform = murmur3([row, 0, 7, column]) / MASK
            scores.append(logprobs[row, column].item() - math.log(-math.log(uniform)))
        assert got[row].item() == scores.index(max(scores))


@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
def test_of_a_large_vocabulary_the_same_columns_are_drawn_as_by_the_noise_of_all(sampling, spread):
    torch.manual_seed(0)
    probabilities = torch.softmax(torch.randn(64, 20_000) * spread, -1)
    seed, position = torch.randint(0, 2**62, (64,)), torch.arange(64)
    hashed = sampling.murmur_hash32(seed, position, torch.arange(20_000))
    noise = -torch.log(-torch.log(hashed.to(torch.float64) / MASK).clamp(max=-(2.0**-32)))
    expected = (probabilities.log() + noise).argmax(1)
    assert sampling.multinomial_with_seed(probabilities.log(), seed, position)[:, 0].equal(expected)
    drawn = sampling.sampling_from_probs(None, probabilities, seed, position)
    assert drawn.equal(expected.to(torch.int32))


def test_frequencies_are_the_probabilities(sampling):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 20000
    logprobs = probabilities.log().expand(count, 5)
    drawn = sampling.multinomial_with_seed(logprobs, torch.arange(count) * 7919, torch.arange(count) % 50)[:, 0]
    frequencies = torch.bincount(drawn, minlength=5) / count
    # Five standard deviations of a binomial.
    assert ((frequencies - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / count).sqrt()).all()


def test_a_row_does_not_depend_on_the_others(sampling):
    torch.manual_seed(0)
    logprobs, seed, position = torch.randn(9, 300), torch.arange(9), torch.arange(9)
    together = sampling.multinomial_with_seed(logprobs, seed, position)
    alone = [
        sampling.multinomial_with_seed(logprobs[i : i + 1], seed[i : i + 1], position[i : i + 1]) for i in range(9)
    ]
    assert together.equal(torch.cat(alone))


def test_impossible_tokens_are_never_drawn(sampling):
    logprobs = torch.full((200, 10), float("-inf"))
    logprobs[:, 3] = 0.0
    assert (sampling.multinomial_with_seed(logprobs, torch.arange(200), torch.arange(200)) == 3).all()


@pytest.mark.parametrize("captures", [False, True])
def test_a_neighbour_with_top_k_leaves_the_tokens_of_other_rows_as_they_were(sampling, captures):
    torch.manual_seed(0)
    probabilities, seed, position = torch.softmax(torch.randn(3, 300), -1), torch.arange(3), torch.arange(3)
    alone = sampling.sampling_from_probs(None, probabilities, seed, position)

    def original(probs, *_, **__):  # SGLang's answer is right for the second row alone, which has a top-k of 1
        tokens = torch.tensor([0, 7, 0], dtype=torch.int32)
        return (tokens, probs.sort().values, probs.argsort(), torch.tensor([0.0, 1.0, 0.0])) if captures else tokens

    top_k, top_p = torch.tensor([1 << 30, 1, 1 << 30]), torch.ones(3)
    got = sampling.narrowed_sampling(original, probabilities, top_k, top_p, None, False, seed, position)
    tokens = got[0] if captures else got
    assert tokens.tolist() == [alone[0].item(), 7, alone[2].item()]
    if captures:
        weights = [probabilities[row, token].item() for row, token in enumerate(alone.tolist())]
        assert got[3].tolist() == [weights[0], 1.0, weights[2]]
