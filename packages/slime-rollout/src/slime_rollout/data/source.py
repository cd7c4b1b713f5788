"""Where groups come from: epoch after epoch of a data set, with a position that can be written down.

The order of an epoch is a fact of its number, the seed and the data (see `slime_rollout.data.order`), so the epoch's
number and the position in it are all that has to be written down.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Group, Sample
from slime_rollout.data.dataset import PromptDataset


class RolloutDataSource:
    """Endless groups of fresh samples; groups given back come first. Implements `slime_core.interfaces.DataSource`.

    Args:
        dataset: The prompts. A batch may be larger than the data set, and may span epochs.
        samples_per_prompt: Size of a group.
        shuffle: Shuffle every epoch by its own order.
        seed: Seed of the shuffle.
    """

    def __init__(
        self, dataset: PromptDataset, *, samples_per_prompt: int, shuffle: bool = False, seed: int = 0
    ) -> None:
        self._dataset = dataset
        self._size = samples_per_prompt
        self._shuffle = shuffle
        self._seed = seed
        self._identity = {"prompts": len(dataset), "digest": dataset.digest, "shuffle": shuffle, "seed": seed}
        self._epoch = self._position = self._next_group = self._next_sample = 0
        self._buffer: deque[Group] = deque()
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """The epoch of the next fresh prompt, from 0."""
        return self._epoch

    def get_samples(self, num_groups: int) -> list[Group]:
        """The next groups: those given back first, in their order, then fresh ones."""
        return [self._buffer.popleft() if self._buffer else self._fresh_group() for _ in range(num_groups)]

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back, to be handed out again."""
        self._buffer.extend(groups)

    def state_dict(self) -> dict[str, Any]:
        """Position, counters and the groups given back, as plain values that share nothing with this object."""
        return {
            "data": dict(self._identity),
            "epoch": self._epoch,
            "position": self._position,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "buffer": copy.deepcopy([[sample.to_dict() for sample in group] for group in self._buffer]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the group that came next when ``state`` was taken.

        Raises:
            DataError: The state belongs to other prompts or another order of them.
        """
        if state["data"] != self._identity:
            changed = {key: (state["data"].get(key), now) for key, now in self._identity.items()}
            text = ", ".join(f"{key} {old} → {now}" for key, (old, now) in changed.items() if old != now)
            raise DataError(
                f"the saved data position belongs to other prompts or another order ({text}); continue with the same "
                "prompt file, tokenizer, --rollout-shuffle and --rollout-seed, or start a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        buffer = copy.deepcopy(state["buffer"])
        self._buffer = deque([Sample.from_dict(values) for values in group] for group in buffer)
        self._order = self._epoch_order()

    def _fresh_group(self) -> Group:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        group = self._dataset.group(
            self._order[self._position],
            group_index=self._next_group,
            first_index=self._next_sample,
            size=self._size,
        )
        self._position += 1
        self._next_group += 1
        self._next_sample += self._size
        return group

    def _epoch_order(self) -> list[int]:
        return self._dataset.epoch_order(self._epoch, shuffle=self._shuffle, seed=self._seed)
