"""Which rank and micro-batch each sample of one optimizer step goes to. Plain numbers; no torch."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from slime_core.balance import balance, try_balance
from slime_core.errors import ConfigError
from slime_core.micro_batches import MicroBatchLimits, RankMicroBatches, plan_micro_batches
from slime_core.types import TrainSample

Cost = Callable[[int], float]
"""The cost to compute a sequence of so many tokens; the cost of a beginning is part of the whole's."""


def token_count(tokens: int) -> int:
    """The cost that counts tokens."""
    return tokens


class _Piece(NamedTuple):
    """Samples of a group that stay together. The one of most samples sorts first."""

    minus_size: int
    cost: float
    positions: list[int]


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans steps over a rollout's samples.

    Attributes:
        samples: The rollout's samples.
        ranks: Number of data-parallel ranks.
        limits: What a micro-batch may hold, over all its context-parallel ranks.
        by_group: Keep the samples of a prompt in one micro-batch as far as they fit; for one limit, not for both.
        pairs: Keep the two samples of a group in one micro-batch, whatever the limit.
        cost: What is balanced.
        context_parallel_size: Number of ranks that a sequence is cut over; it is padded for that.

    Raises:
        ConfigError: ``by_group`` with limits of both samples and tokens.
    """

    samples: Sequence[TrainSample]
    ranks: int
    limits: MicroBatchLimits
    by_group: bool = False
    pairs: bool = False
    cost: Cost = token_count
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.by_group and self.limits.samples and self.limits.tokens:
            raise ConfigError("samples of a prompt are kept together under a limit of samples or of tokens; got both")

    def plan(self, members: Sequence[int]) -> list[RankMicroBatches]:
        """Place one step's samples: per rank equally many micro-batches, of positions in ``samples``.

        A micro-batch is empty only if there are fewer samples, or pairs, than micro-batches.
        """
        if not members:
            return [[[]] * self.limits.round_up(0) for _ in range(self.ranks)]
        if self.pairs:
            return self._in_pairs(self._groups(members))
        plan = self._together(self._groups(members)) if self.by_group else None
        return plan or self._placed([[position] for position in members], self.limits)

    def _placed(self, units: list[list[int]], limits: MicroBatchLimits) -> list[RankMicroBatches]:
        """Micro-batches under the limits, of samples that stay together; each unit counts as one."""
        costs = [self.cost_of(unit) for unit in units]
        tokens = [self._tokens(unit) for unit in units]
        plan = plan_micro_batches(tokens, ranks=self.ranks, limits=limits, costs=costs)
        return [[_joined([units[at] for at in chosen]) for chosen in micro_batches] for micro_batches in plan]

    def _in_pairs(self, pairs: list[list[int]]) -> list[RankMicroBatches]:
        """Micro-batches of whole pairs: a limit of samples is one of half as many pairs."""
        limits = self.limits
        if limits.samples is not None:
            limits = dataclasses.replace(limits, samples=max(limits.samples // 2, 1))
        return self._placed(pairs, limits)

    def _together(self, groups: list[list[int]]) -> list[RankMicroBatches] | None:
        """Micro-batches under the limit, of pieces of groups that stay together; ``None`` if one would be empty."""
        if self.limits.samples is not None:
            return self._filled(groups, self.limits.samples)
        pieces = [piece for group in groups for piece in self._cut(group, self.limits.tokens or math.inf)]
        plan = self._placed(pieces, self.limits)
        return plan if all(chosen for micro_batches in plan for chosen in micro_batches) else None

    def _filled(self, groups: list[list[int]], size: int) -> list[RankMicroBatches] | None:
        """Pieces of groups to as few micro-batches of ``size`` samples as are found to do, and these to ranks."""
        pieces = [self._piece(group[at : at + size]) for group in groups for at in range(0, len(group), size)]
        total, step = sum(map(len, groups)), self.ranks * self.limits.multiple
        for count in range(-(-total // (size * step)) * step, total + 1, step):
            pieces = self._halved(pieces, count)
            costs, sizes = [piece.cost for piece in pieces], [-piece.minus_size for piece in pieces]
            placed = try_balance(costs, count, min_items=1, sizes=sizes, max_size=size)
            if placed is not None:
                return self._to_ranks([[pieces[at] for at in chosen] for chosen in placed])
        return None

    def _to_ranks(self, micro_batches: list[list[_Piece]]) -> list[RankMicroBatches]:
        """Equally many to each rank, the costliest first."""
        costs = [sum([piece.cost for piece in pieces]) for pieces in micro_batches]
        each = len(micro_batches) // self.ranks
        ranks = balance(costs, self.ranks, min_items=each, max_items=each)
        return [
            [
                _joined([piece.positions for piece in micro_batches[at]])
                for at in sorted(chosen, key=lambda at: (-costs[at], at))
            ]
            for chosen in ranks
        ]

    def _piece(self, positions: list[int]) -> _Piece:
        return _Piece(-len(positions), self.cost_of(positions), positions)

    def _halved(self, pieces: list[_Piece], count: int) -> list[_Piece]:
        """``count`` pieces or more: the one of most samples is halved until there are."""
        result = [*pieces]
        heapq.heapify(result)
        while len(result) < count:
            positions = result[0].positions
            half = len(positions) // 2
            heapq.heapreplace(result, self._piece(positions[:half]))
            heapq.heappush(result, self._piece(positions[half:]))
        return result

    def _groups(self, members: Sequence[int]) -> list[list[int]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for position in members:
            groups[self.samples[position].group_index].append(position)
        return list(groups.values())

    def _cut(self, group: list[int], cap: float) -> list[list[int]]:
        """A group in pieces that go into one micro-batch each."""
        pieces: list[list[int]] = [[]]
        for position in group:
            longer = [*pieces[-1], position]
            if pieces[-1] and self._tokens(longer) > cap:
                pieces.append([position])
            else:
                pieces[-1] = longer
        return pieces

    def _tokens(self, unit: Sequence[int]) -> float:
        """The tokens that a unit adds. Sequences that are cut over ranks are padded one by one and share no prompt."""
        if self.context_parallel_size == 1:
            return self._sum(unit, token_count)
        chunks = 2 * self.context_parallel_size  # each rank holds two, one near each end: equal work for all
        return sum(-(-len(self.samples[position].tokens) // chunks) * chunks for position in unit)

    def cost_of(self, positions: Sequence[int]) -> float:
        """The cost of samples that stay together; a prompt that several of them share counts once."""
        return self._sum(positions, self.cost)

    def _sum(self, positions: Sequence[int], cost: Cost) -> float:
        if len(positions) == 1:
            return cost(len(self.samples[positions[0]].tokens))
        prompts: set[tuple[int, bytes]] = set()
        total: float = 0
        for position in positions:
            sample = self.samples[position]
            length, prompt = len(sample.tokens), sample.prompt_length
            total += cost(length)
            tokens = (sample.group_index, sample.tokens[:prompt].tobytes())
            if tokens in prompts:
                total -= cost(prompt)
            prompts.add(tokens)
        return total


def _joined(units: Iterable[Sequence[int]]) -> list[int]:
    return sorted(chain.from_iterable(units))
