import heapq
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.balance import balance, lower_bound, try_balance
from slime_core.errors import ConfigError, DataError

WEIGHTS = st.lists(st.integers(0, 50) | st.floats(0, 50), max_size=30)


def heaviest(weights, bins):
    return max(sum(weights[item] for item in bin_) for bin_ in bins)


def largest_first(weights, bins):
    """Plain LPT: what the exchanges start from."""
    heap = [(0, index, []) for index in range(bins)]
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        load, index, items = heap[0]
        heapq.heapreplace(heap, (load + weights[item], index, [*items, item]))
    return [items for _, _, items in heap]


def log_normal(count, seed=0, median=2000):
    generator = random.Random(seed)
    return [min(16_384, max(1, round(generator.lognormvariate(math.log(median), 1)))) for _ in range(count)]


@given(st.lists(st.integers(0, 30), max_size=7), st.integers(1, 3))
def test_close_to_the_optimum(weights, bins):
    """Graham's bound: LPT is at most 4/3 - 1/(3 bins) times the best of all placements."""
    placements = itertools.product(range(bins), repeat=len(weights))
    best = min(
        max(sum(weight for weight, at in zip(weights, placement, strict=True) if at == index) for index in range(bins))
        for placement in placements
    )
    found = heaviest(weights, balance(weights, bins))
    assert lower_bound(weights, bins) <= best <= found <= best * (4 / 3 - 1 / (3 * bins)) + 1e-9


@given(WEIGHTS, st.integers(1, 6))
def test_never_worse_than_largest_first(weights, bins):
    placed = balance(weights, bins)
    assert sorted(itertools.chain(*placed)) == list(range(len(weights)))
    assert heaviest(weights, placed) <= heaviest(weights, largest_first(weights, bins)) * (1 + 1e-12)


def test_swaps_pay_where_bins_hold_few_items():
    weights = log_normal(512)
    bound, each = lower_bound(weights, 64), {"min_items": 8, "max_items": 8}
    assert bound * 1.009 < heaviest(weights, largest_first(weights, 64)) < bound * 1.011
    assert heaviest(weights, balance(weights, 64)) <= bound * 1.01
    # With as many items in each bin, largest first alone is 1.6 % above the bound.
    assert heaviest(weights, balance(weights, 64, **each)) <= bound * 1.01


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("largest", [None, 2.0])
def test_8192_samples_on_64_ranks_come_within_1_percent(seed, largest):
    weights = log_normal(8192, seed)
    if largest is not None:
        weights[100] = round(largest * sum(weights) / 64)
        assert lower_bound(weights, 64) == weights[100]
    assert heaviest(weights, balance(weights, 64)) <= 1.01 * lower_bound(weights, 64)


@given(
    WEIGHTS, st.integers(1, 5), st.integers(0, 4), st.integers(0, 8) | st.none(),
    st.floats(20, 200) | st.just(math.inf), st.randoms(use_true_random=False),
)  # fmt: skip
def test_limits_hold(weights, bins, min_items, max_items, max_size, generator):
    sizes = [generator.randint(0, 20) for _ in weights]
    limits = {"min_items": min_items, "max_items": max_items, "sizes": sizes, "max_size": max_size}
    placed = try_balance(weights, bins, **limits)
    most = len(weights) if max_items is None else max_items
    possible = min_items * bins <= len(weights) <= most * bins
    if placed is None:
        assert not possible or max_size < math.inf
        with pytest.raises(
            DataError, match=f"{len(weights)} items .* in {bins} bins of {min_items} to {max_items} items"
        ):
            balance(weights, bins, **limits)
        return
    assert possible
    assert len(placed) == bins
    assert sorted(itertools.chain(*placed)) == list(range(len(weights)))
    for items in placed:
        assert min_items <= len(items) <= most
        assert sum(sizes[item] for item in items) <= max_size
    assert placed == try_balance(weights, bins, **limits)


def test_a_heavy_bin_gets_its_least_items_from_the_lightest():
    weights = [1000, 1, 2, 3, 40, 41, 42, 43]
    placed = balance(weights, 2, min_items=3)
    assert sorted(map(sorted, placed)) == [[0, 1, 2], [3, 4, 5, 6, 7]]


@pytest.mark.parametrize(("sizes", "limit"), [([5, 4, 4, 7, 7], 16), ([6, 3, 6, 7, 1], 13)])
def test_no_exchange_that_a_size_forbids(sizes, limit):
    """6 + 5 and 4 + 4 + 3 weigh 11 each; an exchange that leads there makes the heavy, or the light, bin too large."""
    weights = [6, 5, 4, 4, 3]
    assert heaviest(weights, balance(weights, 2, sizes=sizes, max_size=100)) == 11
    placed = balance(weights, 2, sizes=sizes, max_size=limit)
    assert heaviest(weights, placed) == 12
    assert max(sum(sizes[item] for item in items) for items in placed) <= limit


def test_the_largest_items_come_first_where_room_is_short():
    """Heaviest first would put both items of size 1 before the last of size 2, which then finds no room."""
    sizes, weights = [2, 2, 1, 1], [3, 1, 9, 9]
    placed = balance(weights, 2, sizes=sizes, max_size=3)
    assert sorted(sum(sizes[item] for item in items) for items in placed) == [3, 3]
    assert heaviest(weights, placed) == 12


def test_sizes_are_followed_through_many_exchanges():
    generator = random.Random(1)
    found = 0
    for _ in range(200):
        weights = [generator.randint(1, 100) for _ in range(20)]
        sizes = [generator.randint(1, 20) for _ in weights]
        limit = 1.1 * sum(sizes) / 4
        if placed := try_balance(weights, 4, sizes=sizes, max_size=limit):
            found += 1
            assert max(sum(sizes[item] for item in items) for items in placed) <= limit
    assert found > 50


def test_bad_arguments():
    with pytest.raises(ConfigError, match="over 0 bins; give 1 or more"):
        balance([1.0], 0)
    for broken in (-1.0, math.nan, math.inf):
        with pytest.raises(DataError, match="weights to balance must be finite numbers, 0 or more; got"):
            balance([1.0, broken], 2)
    with pytest.raises(DataError, match="1 sizes for 2 weights"):
        balance([1.0, 2.0], 2, sizes=[1])
    with pytest.raises(DataError, match="3 items found no room in 2 bins of 2 to None items"):
        balance([1.0, 2.0, 3.0], 2, min_items=2)
