"""Numbers into bins so that the heaviest bin is nearly as light as possible. Plain numbers; no torch.

Largest first into the lightest bin (LPT; Graham 1969). Where that ends more than 1 % above the lower bound, as it does
with few items per bin, items of the heaviest bin are swapped for lighter ones. Karmarkar and Karp's differencing (1982)
comes closer to the bound with many items, by less than 1 %, and takes 6 to 30 times as long.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from slime_core.errors import ConfigError, DataError

_CLOSE = 1.01  # over the lower bound; swaps below that gain less than they cost
_MOST_SWAPS = 4  # per bin, which limits the time


def lower_bound(weights: Sequence[float], bins: int) -> float:
    """The least that the heaviest bin can weigh: the mean load, or the largest weight."""
    return max(math.fsum(weights) / bins, max(weights, default=0))


def balance(
    weights: Sequence[float],
    bins: int,
    *,
    min_items: int = 0,
    max_items: int | None = None,
    sizes: Sequence[float] | None = None,
    max_size: float = math.inf,
) -> list[list[int]]:
    """Spread items over bins so that the bins weigh about the same; positions in ``weights`` per bin. Deterministic.

    Args:
        weights: What each item weighs, 0 or more.
        bins: Number of bins.
        min_items: Fewest items in a bin.
        max_items: Most items in a bin; ``None`` for no limit.
        sizes: A second number per item, whose sum per bin is limited by ``max_size``. ``None`` means the weights.
        max_size: That limit.

    Raises:
        ConfigError: ``bins`` is below 1.
        DataError: A weight or the sizes are invalid, or no placement within the limits was found.
    """
    placed = try_balance(weights, bins, min_items=min_items, max_items=max_items, sizes=sizes, max_size=max_size)
    if placed is None:
        raise DataError(
            f"{len(weights)} items found no room in {bins} bins of {min_items} to {max_items} items and a size of "
            f"{max_size} at most; loosen a limit or take more bins"
        )
    return placed


def try_balance(
    weights: Sequence[float],
    bins: int,
    *,
    min_items: int = 0,
    max_items: int | None = None,
    sizes: Sequence[float] | None = None,
    max_size: float = math.inf,
) -> list[list[int]] | None:
    """:func:`balance`, but ``None`` where the counts allow no placement or the search found no bin for an item."""
    if bins < 1:
        raise ConfigError(f"cannot balance over {bins} bins; give 1 or more")
    if broken := [weight for weight in weights if not 0 <= weight < math.inf]:
        raise DataError(f"weights to balance must be finite numbers, 0 or more; got {broken[:5]}")
    sizes = weights if sizes is None else sizes
    if len(sizes) != len(weights):
        raise DataError(f"{len(sizes)} sizes for {len(weights)} weights; give one of each per item")
    most = len(weights) if max_items is None else max_items
    if not min_items * bins <= len(weights) <= most * bins:
        return None
    placed = _largest_first(weights, bins, min_items, most, sizes, max_size)
    return placed and _Bins(weights, placed, min_items, most, sizes, max_size).level()


def _largest_first(
    weights: Sequence[float], bins: int, min_items: int, most: int, sizes: Sequence[float], max_size: float
) -> list[list[int]] | None:
    placed: list[list[int]] = [[] for _ in range(bins)]
    space = [max_size] * bins
    heap: list[tuple[float, int]] = [(0, index) for index in range(bins)]
    crowded: list[tuple[float, int]] = []  # bins too full for items of this size; no item is larger
    short, left, limit, size = bins * min_items, len(weights), most, max_size
    for item in _order(weights, sizes if max_size < math.inf else weights):
        if left == short and limit != min_items:  # from here on every item goes to a bin that has too few
            limit = min_items
            heap = [entry for entry in heap + crowded if len(placed[entry[1]]) < limit]
            heapq.heapify(heap)
            crowded = []
        if sizes[item] != size:
            size = sizes[item]
            for entry in crowded:
                heapq.heappush(heap, entry)
            crowded = []
        while heap and space[heap[0][1]] < size:
            crowded.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        bin_ = placed[index]
        left -= 1
        short -= len(bin_) < min_items
        bin_.append(item)
        space[index] -= size
        if len(bin_) < limit:
            heapq.heapreplace(heap, (load + weights[item], index))
        else:
            heapq.heappop(heap)
    return placed


def _order(weights: Sequence[float], sizes: Sequence[float]) -> list[int]:
    """The largest first, because they are the hardest to place; among equals the heaviest."""
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    if sizes is not weights:
        order.sort(key=sizes.__getitem__, reverse=True)
    return order


class _Bins:
    """Bins that swap items, or move one, until the heaviest is close to the lower bound or no swap helps."""

    def __init__(
        self,
        weights: Sequence[float],
        placed: list[list[int]],
        min_items: int,
        most: int,
        sizes: Sequence[float],
        max_size: float,
    ) -> None:
        self.weights, self.sizes = weights, sizes
        self.min_items, self.most, self.max_size = min_items, most, max_size
        self.placed = placed
        self.items: dict[int, list[tuple[float, int]]] = {}  # (weight, item) of a bin in rising order, once needed
        self.loads = [sum([weights[item] for item in items]) for items in placed]
        self.used = [sum([sizes[item] for item in items]) for items in placed]

    def level(self) -> list[list[int]]:
        """The bins after the swaps."""
        enough = lower_bound(self.weights, len(self.placed)) * _CLOSE
        for _ in range(_MOST_SWAPS * len(self.placed)):
            by_load = sorted(range(len(self.loads)), key=self.loads.__getitem__)
            heavy = by_load.pop()
            if self.loads[heavy] <= enough or not any(self._swap(heavy, light) for light in by_load):
                break
        return [
            [item for _, item in self.items[at]] if at in self.items else bin_ for at, bin_ in enumerate(self.placed)
        ]

    def _sorted(self, index: int) -> list[tuple[float, int]]:
        if index not in self.items:
            self.items[index] = sorted((self.weights[item], item) for item in self.placed[index])
        return self.items[index]

    def _swap(self, heavy: int, light: int) -> bool:
        """Make the swap or move between two bins that comes nearest to equal loads; whether one helps."""
        gap = self.loads[heavy] - self.loads[light]
        givers, takers = self._sorted(heavy), self._sorted(light)
        movable = len(givers) > self.min_items and len(takers) < self.most
        best: tuple[float, tuple[float, int], tuple[float, int] | None] | None = None
        for given in givers:
            nearest = bisect_left(takers, (given[0] - gap / 2, -1))
            candidates: list[tuple[float, int] | None] = [*takers[max(nearest - 1, 0) : nearest + 1]]
            for returned in [*candidates, None] if movable else candidates:
                off = abs(given[0] - (returned[0] if returned else 0.0) - gap / 2)
                if off < gap / 2 and (best is None or off < best[0]) and self._fits(heavy, light, given, returned):
                    best = (off, given, returned)
        if best is None:
            return False
        before = self.loads[heavy]
        self._shift(best[1], heavy, light)
        if best[2] is not None:
            self._shift(best[2], light, heavy)
        return max(self.loads[heavy], self.loads[light]) < before  # not so where rounding lost the gain

    def _fits(self, heavy: int, light: int, given: tuple[float, int], returned: tuple[float, int] | None) -> bool:
        change = self.sizes[given[1]] - (self.sizes[returned[1]] if returned else 0)
        return self.used[light] + change <= self.max_size and self.used[heavy] - change <= self.max_size

    def _shift(self, entry: tuple[float, int], source: int, target: int) -> None:
        weight, item = entry
        self.items[source].remove(entry)
        insort(self.items[target], entry)
        self.loads[source] -= weight
        self.loads[target] += weight
        self.used[source] -= self.sizes[item]
        self.used[target] += self.sizes[item]
