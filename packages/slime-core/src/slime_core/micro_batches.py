"""One optimizer step's samples to data-parallel ranks and micro-batches. Plain numbers; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.balance import balance, try_balance
from slime_core.errors import ConfigError, DataError

RankMicroBatches = list[list[int]]
"""Per micro-batch of one rank, positions of its samples."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """Limits of a micro-batch, and of the number that a rank may have.

    Attributes:
        samples: Most samples in a micro-batch; ``None`` sets no limit.
        tokens: Most tokens in a micro-batch; ``None`` sets no limit. A longer sample gets a micro-batch to itself.
        multiple: The number of micro-batches is a multiple of this: a virtual pipeline's group of micro-batches.

    Raises:
        ConfigError: A number is below 1, or no limit is given.
    """

    samples: int | None = None
    tokens: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("tokens", self.tokens), ("multiple", self.multiple)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} of the micro-batch limits must be 1 or more")
        if self.samples is None and self.tokens is None:
            raise ConfigError("micro-batches need a limit; give samples or tokens")

    def round_up(self, count: int) -> int:
        """The next multiple of ``multiple``, at least one."""
        return max(1, -(-count // self.multiple)) * self.multiple


def plan_micro_batches(
    tokens: Sequence[float], *, ranks: int, limits: MicroBatchLimits, costs: Sequence[float] | None = None
) -> list[RankMicroBatches]:
    """Place the samples of one step: balanced over the ranks first, then over each rank's micro-batches.

    Every sample is in one micro-batch. All ranks have equally many, the fewest that were found to fit, the costliest
    first: memory trouble shows at once, and ranks that meet in every micro-batch (expert parallelism) keep pace. A
    micro-batch is empty only if there are fewer samples than micro-batches. The same arguments give the same plan.

    Args:
        tokens: Length of each sample.
        ranks: Number of data-parallel ranks.
        limits: What a micro-batch may hold.
        costs: What is balanced; ``None`` means the tokens. See :class:`slime_core.flops.FlopsModel`.

    Returns:
        Per rank and micro-batch, positions in ``tokens``.

    Raises:
        ConfigError: ``ranks`` is below 1.
        DataError: The costs are invalid, or not one per sample.
    """
    costs = tokens if costs is None else costs
    if len(costs) != len(tokens):
        raise DataError(f"{len(costs)} costs for {len(tokens)} samples; give one per sample")
    if ranks < 1:
        raise ConfigError(f"cannot plan for {ranks} ranks; give 1 or more")
    count = limits.round_up(-(-_fewest(tokens, range(len(tokens)), limits) // ranks))
    members: list[list[int]] = []
    while True:
        least = min(count, len(tokens) // ranks)
        if not members or min(map(len, members)) < least:
            most = None if limits.samples is None else limits.samples * count
            members = balance(costs, ranks, min_items=least, max_items=most)
        plan = []
        for positions in members:
            if (micro_batches := _fit(tokens, costs, positions, count, limits)) is None:
                count = max(count + limits.multiple, limits.round_up(_fewest(tokens, positions, limits)))
                break
            plan.append(_costliest_first(costs, micro_batches))
        else:
            return plan


def _fewest(tokens: Sequence[float], positions: Sequence[int], limits: MicroBatchLimits) -> int:
    """A lower bound of the number of micro-batches."""
    fewest = 1 if limits.samples is None else math.ceil(len(positions) / limits.samples)
    if limits.tokens is None:
        return fewest
    long = sum(tokens[position] > limits.tokens for position in positions)
    rest = sum(tokens[position] for position in positions if tokens[position] <= limits.tokens)
    return max(fewest, long + math.ceil(rest / limits.tokens))


def _fit(
    tokens: Sequence[float], costs: Sequence[float], positions: Sequence[int], count: int, limits: MicroBatchLimits
) -> RankMicroBatches | None:
    """One rank's samples in ``count`` micro-batches; ``None`` where they do not go in."""
    if len(positions) <= count:
        return [[position] for position in positions] + [[] for _ in range(count - len(positions))]
    cap = math.inf if limits.tokens is None else limits.tokens
    alone = [[position] for position in positions if tokens[position] > cap]
    rest = [position for position in positions if tokens[position] <= cap]
    bins = count - len(alone)
    if bins < 1:
        return None
    placed = try_balance(
        [costs[position] for position in rest],
        bins,
        min_items=1,
        max_items=limits.samples,
        sizes=[tokens[position] for position in rest],
        max_size=cap,
    )
    if placed is not None:
        return alone + [[rest[index] for index in bin_] for bin_ in placed]
    packed = _first_fit(tokens, rest, cap, limits.samples or len(rest))
    return None if len(packed) > bins else alone + _split_to(costs, packed, bins)


def _first_fit(tokens: Sequence[float], positions: Sequence[int], cap: float, most: int) -> RankMicroBatches:
    """The longest first, each into the first that it fits (at most 11/9 of the fewest plus 6/9; Dósa 2007)."""
    bins: RankMicroBatches = []
    loads: list[float] = []
    for position in sorted(positions, key=lambda position: (-tokens[position], position)):
        length = tokens[position]
        for index, load in enumerate(loads):
            if load + length <= cap and len(bins[index]) < most:
                break
        else:
            index = len(bins)
            bins.append([])
            loads.append(0)
        bins[index].append(position)
        loads[index] += length
    return bins


def _split_to(costs: Sequence[float], bins: RankMicroBatches, count: int) -> RankMicroBatches:
    """Halve the costliest micro-batch of two samples or more until there are ``count``."""
    result = list(bins)
    while len(result) < count:
        divisible = [index for index, bin_ in enumerate(result) if len(bin_) > 1]
        bin_ = result.pop(max(divisible, key=lambda index: _cost(costs, result[index])))
        halves = balance([costs[position] for position in bin_], 2, min_items=1)
        result += [[bin_[index] for index in half] for half in halves]
    return result


def _costliest_first(costs: Sequence[float], micro_batches: RankMicroBatches) -> RankMicroBatches:
    ordered = [sorted(positions) for positions in micro_batches]
    return sorted(ordered, key=lambda positions: (-_cost(costs, positions), positions))


def _cost(costs: Sequence[float], positions: Sequence[int]) -> float:
    return sum([costs[position] for position in positions])
