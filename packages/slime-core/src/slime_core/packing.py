"""Balanced bins of samples. Greedy and deterministic: the heaviest block first, into the lightest bin with room."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Block:
    """Samples that stay together.

    Attributes:
        positions: Positions of the samples in the rollout.
        tokens: What computing them costs, in tokens or another unit.
    """

    positions: tuple[int, ...]
    tokens: float


Bin = list[Block]


def num_samples(bin_: Iterable[Block]) -> int:
    """Number of samples in a bin."""
    return sum(len(block.positions) for block in bin_)


def pack(blocks: Iterable[Block], *, bins: int, capacity: int, grow: bool = False) -> list[Bin]:
    """Spread blocks over bins so that the bins' tokens are about equal.

    Blocks with more samples go first, so that large ones find room; among equals, those with more tokens.

    Args:
        blocks: What to place.
        bins: Number of bins.
        capacity: Most samples in a bin.
        grow: Open a new bin for a block that finds no room. Otherwise it goes to the bin with the fewest samples,
            over capacity.

    Returns:
        The bins; without ``grow`` some may be empty.
    """
    packed: list[Bin] = [[] for _ in range(bins)]
    used = [0] * bins
    open_bins: list[tuple[float, int]] = [
        (0, index) for index in range(bins)
    ]  # a heap of (tokens, bin), full bins left out
    for block in sorted(blocks, key=lambda block: (-len(block.positions), -block.tokens, block.positions)):
        size, crowded, chosen = len(block.positions), [], None
        while open_bins and chosen is None:
            entry = heapq.heappop(open_bins)
            if used[entry[1]] + size <= capacity:
                chosen = entry
            else:
                crowded.append(entry)
        for entry in crowded:
            heapq.heappush(open_bins, entry)
        if chosen is None and grow:
            packed.append([])
            used.append(0)
            chosen = (0, len(packed) - 1)
        tokens, index = chosen or (0, min(range(len(packed)), key=lambda index: (used[index], index)))
        packed[index].append(block)
        used[index] += size
        if chosen is not None and used[index] < capacity:
            heapq.heappush(open_bins, (tokens + block.tokens, index))
    return packed


def split_to(count: int, bins: Sequence[Bin], make_block: Callable[[Sequence[int]], Block]) -> list[Bin]:
    """Split bins until there are ``count``, the one with most samples first.

    Args:
        count: Number of bins wanted, at most the number of samples.
        bins: Bins that each hold a sample or more, ``count`` of them or fewer.
        make_block: Builds a block from positions, for the halves of a block that must be cut.

    Returns:
        ``count`` bins.
    """
    result = list(bins)
    while len(result) < count:
        largest = max(range(len(result)), key=lambda index: (num_samples(result[index]), -index))
        blocks = result.pop(largest)
        if len(blocks) == 1:
            positions = blocks[0].positions
            half = len(positions) // 2
            blocks = [make_block(positions[:half]), make_block(positions[half:])]
        result += pack(blocks, bins=2, capacity=num_samples(blocks) - 1)
    return result
