"""Which rank and micro-batch each sample of one optimizer step goes to. Plain numbers; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from slime_core.context_parallel import padded_length
from slime_core.micro_batches import MicroBatchLimits, RankMicroBatches, plan_micro_batches
from slime_core.packing import Bin, Block, num_samples, pack, split_to
from slime_core.types import TrainSample

Cost = Callable[[int], float]
"""What computing a sequence of so many tokens costs; the cost of a beginning is part of the whole's."""


def token_count(tokens: int) -> int:
    """The cost that counts tokens."""
    return tokens


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """Plans steps over a rollout's samples.

    Attributes:
        samples: The rollout's samples.
        ranks: Number of data-parallel ranks.
        limits: What a micro-batch may hold, over all its context-parallel ranks.
        by_group: Keep the samples of a prompt together as far as they fit.
        cost: What is balanced.
        context_parallel_size: Number of ranks that a sequence is cut over; it is padded for that.
    """

    samples: Sequence[TrainSample]
    ranks: int
    limits: MicroBatchLimits
    by_group: bool = False
    cost: Cost = token_count
    context_parallel_size: int = 1

    def plan(self, members: Sequence[int]) -> list[RankMicroBatches]:
        """Place one step's samples.

        Args:
            members: Their positions in ``samples``.

        Returns:
            Per rank its micro-batches of positions, equally many on each. A micro-batch is empty only if there are
            fewer samples than micro-batches.
        """
        if (size := self.limits.samples) and len(members) % (self.ranks * size * self.limits.multiple) == 0:
            return self._full(members, size)
        if self.by_group and (cap := self.limits.tokens):
            plan = self._limited([piece for group in self._groups(members) for piece in self._cut(group, cap)])
            if all(positions for micro_batches in plan for positions in micro_batches):
                return plan
        return self._limited([[position] for position in members])

    def _full(self, members: Sequence[int], size: int) -> list[RankMicroBatches]:
        """Micro-batches of ``size`` samples; groups kept together may leave some less full."""
        plan: list[list[Bin]] = []
        if self.by_group:
            plan = self._spread([self._block(group) for group in self._groups(members)], size)
        count = self.limits.round_up(max(map(len, plan), default=0))
        if not plan or any(sum(map(num_samples, bins)) < count for bins in plan):
            plan = self._spread([self._block([position]) for position in members], size)
            count = len(plan[0])  # the sizes divide, so all ranks have equally many
        return [self._in_order(split_to(count, bins, self._block)) for bins in plan]

    def _spread(self, blocks: list[Block], size: int) -> list[list[Bin]]:
        """Blocks to ranks, then each rank's blocks, cut to fit, to as few micro-batches as they need."""
        plan = []
        for rank_blocks in pack(blocks, bins=self.ranks, capacity=num_samples(blocks) // self.ranks):
            pieces = list(chain.from_iterable(self._pieces(block, size) for block in rank_blocks))
            fewest = -(-num_samples(pieces) // size)
            plan.append(pack(pieces, bins=fewest, capacity=size, grow=True))
        return plan

    def _pieces(self, block: Block, size: int) -> list[Block]:
        positions = block.positions
        if len(positions) <= size:
            return [block]
        return [self._block(positions[start : start + size]) for start in range(0, len(positions), size)]

    def _in_order(self, bins: list[Bin]) -> RankMicroBatches:
        """Positions per micro-batch, the costliest first: memory trouble shows at once, and ranks keep pace."""
        micro_batches = [sorted(position for block in bin_ for position in block.positions) for bin_ in bins]
        return sorted(micro_batches, key=lambda positions: (-self.cost_of(positions), positions))

    def _limited(self, units: list[list[int]]) -> list[RankMicroBatches]:
        """Micro-batches under the limits, of samples that stay together in their unit."""
        tokens = [self._tokens(unit) for unit in units]
        costs = [self.cost_of(unit) for unit in units]
        plan = plan_micro_batches(tokens, ranks=self.ranks, limits=self.limits, costs=costs)
        return [
            [sorted(position for unit in chosen for position in units[unit]) for chosen in micro_batches]
            for micro_batches in plan
        ]

    def _groups(self, members: Sequence[int]) -> list[list[int]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for position in members:
            groups[self.samples[position].group_index].append(position)
        return list(groups.values())

    def _cut(self, group: list[int], cap: int) -> list[list[int]]:
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
        """What a unit adds to a micro-batch. Sequences cut over ranks are padded one by one and share no prompt."""
        if self.context_parallel_size == 1:
            return self._sum(unit, token_count)
        lengths = [len(self.samples[position].tokens) for position in unit]
        return sum(padded_length(length, context_parallel_size=self.context_parallel_size) for length in lengths)

    def cost_of(self, positions: Sequence[int]) -> float:
        """What samples that stay together cost to compute; a prompt that several of them share counts once."""
        return self._sum(positions, self.cost)

    def _block(self, positions: Sequence[int]) -> Block:
        return Block(tuple(positions), self.cost_of(positions))

    def _sum(self, positions: Sequence[int], cost: Cost) -> float:
        if len(positions) == 1:
            return cost(len(self.samples[positions[0]].tokens))
        prompts: set[tuple[int, tuple[int, ...]]] = set()
        responses: float = 0
        for position in positions:
            sample = self.samples[position]
            length, prompt = len(sample.tokens), sample.prompt_length
            prompts.add((sample.group_index, tuple(sample.tokens[:prompt])))
            responses += cost(length) - cost(prompt)
        return responses + sum([cost(len(prompt)) for _, prompt in prompts])
