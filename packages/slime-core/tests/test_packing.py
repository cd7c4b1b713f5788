from hypothesis import given
from hypothesis import strategies as st

from slime_core.packing import Block, num_samples, pack, split_to

SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 100)), max_size=12)


def make_blocks(sizes):
    blocks, start = [], 0
    for size, tokens in sizes:
        blocks.append(Block(tuple(range(start, start + size)), tokens))
        start += size
    return blocks


def one_token_each(positions):
    return Block(tuple(positions), len(positions))


@given(SIZES, st.integers(1, 4), st.integers(5, 9))
def test_growing_bins_keep_to_their_capacity(sizes, bins, capacity):
    blocks = make_blocks(sizes)
    packed = pack(blocks, bins=bins, capacity=capacity, grow=True)
    assert all(num_samples(bin_) <= capacity for bin_ in packed)
    assert sorted(block.positions for bin_ in packed for block in bin_) == [block.positions for block in blocks]


@given(SIZES, st.integers(1, 4), st.integers(1, 9))
def test_a_fixed_number_of_bins_takes_everything(sizes, bins, capacity):
    blocks = make_blocks(sizes)
    packed = pack(blocks, bins=bins, capacity=capacity)
    assert len(packed) == bins
    assert sorted(block.positions for bin_ in packed for block in bin_) == [block.positions for block in blocks]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_bins_differ_by_at_most_the_heaviest_block(tokens, bins):
    blocks = [Block((index,), count) for index, count in enumerate(tokens)]
    loads = [sum(block.tokens for block in bin_) for bin_ in pack(blocks, bins=bins, capacity=len(tokens))]
    assert max(loads) - min(loads) <= max(tokens)


@given(SIZES.filter(bool), st.data())
def test_splitting_gives_the_count_and_loses_nothing(sizes, data):
    blocks = make_blocks(sizes)
    bins = pack(blocks, bins=1, capacity=100)
    count = data.draw(st.integers(1, num_samples(blocks)))
    split = split_to(count, bins, one_token_each)
    assert len(split) == count
    assert all(split)
    positions = sorted(position for bin_ in split for block in bin_ for position in block.positions)
    assert positions == list(range(num_samples(blocks)))
