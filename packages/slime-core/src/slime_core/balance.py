"""Numbers into bins so that the heaviest bin is as light as can be had quickly. Plain numbers; no torch.

Largest first into the lightest bin (LPT; Graham 1969), then exchanges between the heaviest bin and the lightest ones.
Against Karmarkar and Karp's differencing (1982), on log-normal lengths and 64 bins: the heaviest bin is as light or
lighter, in a sixth (512 lengths) to a thirtieth (8,192) of the time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from slime_core.errors import ConfigError, DataError

COMPARISONS_PER_ITEM = 4  # exchanges stop after this many looks at a heavy bin's items, which bounds the time


def lower_bound(weights: Sequence[float], bins: int) -> float:
    """What the heaviest bin weighs at least: the mean load, or the largest weight.

    Args:
        weights: What is spread.
        bins: Number of bins.
    """
    return max(math.fsum(weights) / bins, max(weights, default=0))


def balance(
    weights: Sequence[float],
    bins: int,
    *,
    min_items: int = 0,
    max_items: int | None = None,
    sizes: Sequence[float] | None = None,
    max_size: float = math.inf,
    tolerance: float = 1e-3,
) -> list[list[int]]:
    """Spread items over bins so that the bins weigh about the same. Deterministic.

    Args:
        weights: What each item weighs, 0 or more.
        bins: Number of bins.
        min_items: Fewest items in a bin.
        max_items: Most items in a bin; ``None`` sets no limit.
        sizes: A second number per item, whose sum in a bin has a limit. ``None`` means the weights.
        max_size: That limit.
        tolerance: How close to :func:`lower_bound`, relatively, is close enough to stop.

    Returns:
        Positions in ``weights`` per bin.

    Raises:
        ConfigError: ``bins`` is below 1.
        DataError: A weight is negative, NaN or infinite, the sizes are not one per weight, or no placement within the
            limits was found (which :func:`try_balance` says with ``None``).
    """
    placed = try_balance(
        weights,
        bins,
        min_items=min_items,
        max_items=max_items,
        sizes=sizes,
        max_size=max_size,
        tolerance=tolerance,
    )
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
    tolerance: float = 1e-3,
) -> list[list[int]] | None:
    """As :func:`balance`, or ``None``: the counts allow no placement, or the greedy search met an item without room.

    Raises:
        ConfigError: ``bins`` is below 1.
        DataError: A weight is negative, NaN or infinite, or the sizes are not one per weight.
    """
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
    return placed and _Exchange(weights, placed, min_items, most, sizes, max_size).run(tolerance)


def _largest_first(
    weights: Sequence[float], bins: int, min_items: int, most: int, sizes: Sequence[float], max_size: float
) -> list[list[int]] | None:
    placed: list[list[int]] = [[] for _ in range(bins)]
    room = [max_size] * bins
    heap: list[tuple[float, int]] = [(0, index) for index in range(bins)]
    crowded: list[tuple[float, int]] = []  # bins without room for items of this size, of which none are larger
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
        while heap and room[heap[0][1]] < size:
            crowded.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        bin_ = placed[index]
        left -= 1
        short -= len(bin_) < min_items
        bin_.append(item)
        room[index] -= size
        if len(bin_) < limit:
            heapq.heapreplace(heap, (load + weights[item], index))
        else:
            heapq.heappop(heap)
    return placed


def _order(weights: Sequence[float], sizes: Sequence[float]) -> list[int]:
    """The largest first, because they find room last; among equals the heaviest."""
    order = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    if sizes is not weights:
        order.sort(key=sizes.__getitem__, reverse=True)
    return order


class _Exchange:
    """Moves an item out of the heaviest bin, or swaps it for a lighter one, until that helps no more."""

    def __init__(
        self,
        weights: Sequence[float],
        placed: list[list[int]],
        min_items: int,
        most: int,
        sizes: Sequence[float],
        max_size: float,
    ) -> None:
        self.weights, self.placed, self.sizes = weights, placed, sizes
        self.min_items, self.most, self.max_size = min_items, most, max_size
        self.loads = [sum([weights[item] for item in items]) for items in placed]
        self.used = [sum([sizes[item] for item in items]) for items in placed]
        self.sorted: dict[int, list[tuple[float, int]]] = {}
        self.looks = COMPARISONS_PER_ITEM * len(weights)

    def run(self, tolerance: float) -> list[list[int]]:
        """The bins, improved until the heaviest is this close to the lower bound, relatively."""
        enough = lower_bound(self.weights, len(self.placed)) * (1 + tolerance)
        while self.looks > 0:
            heavy = max(range(len(self.loads)), key=self.loads.__getitem__)
            if self.loads[heavy] <= enough:
                break
            by_load = sorted(range(len(self.loads)), key=self.loads.__getitem__)
            if not any(self._improve(heavy, light) for light in by_load if light != heavy):
                break
        return [
            [item for _, item in self.sorted[index]] if index in self.sorted else items
            for index, items in enumerate(self.placed)
        ]

    def _items(self, index: int) -> list[tuple[float, int]]:
        """A bin's (weight, item) in rising order, made when it is first asked for."""
        if index not in self.sorted:
            self.sorted[index] = sorted((self.weights[item], item) for item in self.placed[index])
        return self.sorted[index]

    def _improve(self, heavy: int, light: int) -> bool:
        """Make the heavier of two bins lighter by one move or swap, the one nearest to equal loads."""
        gap = self.loads[heavy] - self.loads[light]
        if gap <= 0 or self.looks <= 0:
            return False
        givers, takers = self._items(heavy), self._items(light)
        self.looks -= len(givers)
        movable = len(givers) > self.min_items and len(takers) < self.most
        best: tuple[float, int, int | None] | None = None
        for give, (weight, item) in enumerate(givers):
            nearest = bisect_left(takers, (weight - gap / 2, -1))
            candidates: list[int | None] = [take for take in (nearest - 1, nearest) if 0 <= take < len(takers)]
            for take in [*candidates, None] if movable else candidates:
                back, returned = (0.0, None) if take is None else takers[take]
                off = abs(weight - back - gap / 2)
                if off < gap / 2 and (best is None or off < best[0]) and self._fits(heavy, light, item, returned):
                    best = (off, give, take)
        if best is None:
            return False
        before = self.loads[heavy]
        self._exchange(heavy, light, best[1], best[2])
        return max(self.loads[heavy], self.loads[light]) < before  # not so where rounding ate the gain

    def _fits(self, heavy: int, light: int, item: int, returned: int | None) -> bool:
        change = self.sizes[item] - (0 if returned is None else self.sizes[returned])
        return self.used[light] + change <= self.max_size and self.used[heavy] - change <= self.max_size

    def _exchange(self, heavy: int, light: int, give: int, take: int | None) -> None:
        moved = self.sorted[heavy].pop(give)
        returned = None if take is None else self.sorted[light].pop(take)
        self._shift(moved, heavy, light)
        if returned is not None:
            self._shift(returned, light, heavy)

    def _shift(self, entry: tuple[float, int], source: int, target: int) -> None:
        weight, item = entry
        insort(self.sorted[target], entry)
        self.loads[source] -= weight
        self.loads[target] += weight
        self.used[source] -= self.sizes[item]
        self.used[target] += self.sizes[item]
