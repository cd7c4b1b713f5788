import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.context_parallel import padded_length, zigzag_inverse, zigzag_owner, zigzag_positions, zigzag_ranges
from slime_core.errors import ConfigError

CP = st.integers(1, 5)


def chunks_of(sequence, cp, rank):
    """The definition: 2 × cp chunks, rank r takes number r and number 2·cp − 1 − r."""
    if cp == 1:
        return list(sequence)
    size = len(sequence) // (2 * cp)
    chunks = (
        [list(sequence[start : start + size]) for start in range(0, len(sequence), size)] if size else [[]] * 2 * cp
    )
    return chunks[rank] + chunks[2 * cp - 1 - rank]


@given(st.integers(0, 100), CP, st.integers(1, 4))
def test_padding_is_the_least_that_divides(length, cp, multiple):
    unit = multiple * (1 if cp == 1 else 2 * cp)
    padded = padded_length(length, context_parallel_size=cp, multiple=multiple)
    assert padded == min(n for n in range(length, length + unit) if n % unit == 0)


@given(st.lists(st.integers(0, 20), max_size=5), CP)
def test_ranks_hold_their_chunks_and_the_inverse_puts_them_back(raw, cp):
    lengths = [padded_length(length, context_parallel_size=cp) for length in raw]
    flat, expected = [], [[] for _ in range(cp)]
    for number, length in enumerate(lengths):
        sequence = [(number, position) for position in range(length)]
        flat += sequence
        for rank in range(cp):
            expected[rank] += chunks_of(sequence, cp, rank)
    parts = [[flat[at] for at in zigzag_positions(lengths, context_parallel_size=cp, rank=rank)] for rank in range(cp)]
    assert parts == expected
    gathered = [token for part in parts for token in part]
    assert [gathered[at] for at in zigzag_inverse(lengths, context_parallel_size=cp)] == flat


@given(st.integers(1, 20), CP)
def test_the_owner_holds_the_token(length, cp):
    length = padded_length(length, context_parallel_size=cp)
    held = [zigzag_positions([length], context_parallel_size=cp, rank=rank) for rank in range(cp)]
    for position in range(length):
        rank, place = zigzag_owner(position, length=length, context_parallel_size=cp)
        assert held[rank][place] == position


@given(st.integers(1, 20), CP)
def test_causal_attention_is_equal_work_on_all_ranks(length, cp):
    length = padded_length(length, context_parallel_size=cp)
    work = [
        sum(position + 1 for part in zigzag_ranges(length, context_parallel_size=cp, rank=rank) for position in part)
        for rank in range(cp)
    ]
    assert len(set(work)) == 1


def test_an_example():
    assert zigzag_ranges(16, context_parallel_size=2, rank=0) == [range(0, 4), range(12, 16)]
    assert zigzag_ranges(16, context_parallel_size=2, rank=1) == [range(4, 8), range(8, 12)]
    assert zigzag_positions([4, 8], context_parallel_size=2, rank=0) == [0, 3, 4, 5, 10, 11]


def test_bad_arguments():
    with pytest.raises(ConfigError, match="10 tokens do not split into 4 chunks for context-parallel size 2; pad"):
        zigzag_ranges(10, context_parallel_size=2, rank=0)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"context-parallel rank {rank} of 2"):
            zigzag_ranges(8, context_parallel_size=2, rank=rank)
    for position in (-1, 8):
        with pytest.raises(ConfigError, match=f"position {position} is outside a sequence of 8 tokens"):
            zigzag_owner(position, length=8, context_parallel_size=2)
    with pytest.raises(ConfigError, match="cannot pad -1 tokens to a multiple of 1"):
        padded_length(-1, context_parallel_size=2)
    with pytest.raises(ConfigError, match="cannot pad 3 tokens to a multiple of 0"):
        padded_length(3, context_parallel_size=2, multiple=0)
    with pytest.raises(ConfigError, match="context-parallel rank 0 of 0"):
        padded_length(3, context_parallel_size=0)
