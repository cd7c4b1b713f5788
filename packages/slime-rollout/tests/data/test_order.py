from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_rollout.data.order import epoch_order, epoch_shares


def order(sizes, weights, epoch=0, shuffle=True, seed=42):
    return epoch_order(sizes, weights, epoch=epoch, shuffle=shuffle, seed=seed)


def test_without_weights_every_prompt_comes_once():
    assert order([2, 3], None, shuffle=False) == [0, 1, 2, 3, 4]
    assert sorted(order([2, 3], None)) == [0, 1, 2, 3, 4]
    assert order([5], None) == order([2, 3], None)


def test_shares_without_shuffle_are_spread_evenly():
    assert order([4, 2], [1, 2], shuffle=False) == [4, 0, 5, 4, 1, 5]
    assert order([4, 2], [1, 2], epoch=1, shuffle=False) == [4, 2, 5, 4, 3, 5]


@pytest.mark.parametrize("weights", [[3, 1], [0.75, 0.25], [3e300, 1e300]])
def test_only_ratios_count(weights):
    assert epoch_shares([60, 40], weights) == [75, 25]


def test_a_small_weight_still_gives_a_prompt():
    assert epoch_shares([1000, 5], [1, 1e-9]) == [1005, 1]


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=4),
    epochs=st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_each_set_gives_its_share_and_all_its_prompts_in_turn(parts, epochs, shuffle):
    sizes, weights = zip(*parts, strict=True)
    shares = epoch_shares(sizes, weights)
    start, counts = 0, Counter()
    orders = [order(sizes, weights, epoch, shuffle) for epoch in range(epochs)]
    for places in orders:
        counts.update(places)
    for size, share in zip(sizes, shares, strict=True):
        own = range(start, start + size)
        assert all(sum(place in own for place in places) == share for places in orders)
        seen = [counts[place] for place in own]
        assert max(seen) - min(seen) <= 1
        assert sum(seen) == share * epochs
        start += size


def test_epochs_and_seeds_differ():
    orders = {tuple(order([30, 30], [1, 1], epoch, seed=seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9
