"""Where groups come from: epoch after epoch of prompts, what was given back, and a state that holds all of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import Group
from slime_rollout.data.dataset import Dataset, Feed
from slime_rollout.data.group_state import groups_from_plain, plain_groups
from slime_rollout.data.ledger import Fate, Ledger
from slime_rollout.data.stream import StreamingPrompts

logger = logging.getLogger(__name__)

_ENTRIES = ("data", "epoch", "position", "next_group", "next_sample", "ledger", "unfinished", "buffer")


class RolloutDataSource:
    """Endless groups of fresh samples. Implements `slime_core.interfaces.DataSource`.

    What it hands out is out until :attr:`ledger` is told how it ended: `RolloutManager` does that for each rollout.
    What is out when the state is taken is part of it, unfinished responses included, and is handed out first after it
    was loaded. To keep groups that are given back, use `RolloutDataSourceWithBuffer`.

    Args:
        dataset: The prompts, in memory or as a stream. A batch may be larger than the data set, and may span epochs.
        samples_per_prompt: Size of a group.
        shuffle: Shuffle every epoch by its own order.
        seed: Seed of the shuffle.
        args: Every flag by its name, for subclasses and their hooks.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | StreamingPrompts,
        *,
        samples_per_prompt: int,
        shuffle: bool = False,
        seed: int = 0,
        args: HookArgs | None = None,
    ) -> None:
        self.args = args or HookArgs({})
        self._size = samples_per_prompt
        self._seed = seed
        self._feed: Feed = dataset.feed(shuffle=shuffle, seed=seed)
        self._next_group = self._next_sample = 0
        self._ledger = Ledger()
        self._unfinished: deque[Group] = deque()

    @property
    def epoch(self) -> int:
        """The epoch of the next fresh prompt, from 0."""
        return self._feed.epoch

    @property
    def ledger(self) -> Ledger:
        """Where every sample of this source went."""
        return self._ledger

    def get_samples(self, num_groups: int) -> list[Group]:
        """The next groups, one per prompt: first those that were out when a loaded state was taken, then fresh ones.

        Args:
            num_groups: How many.

        Raises:
            DataError: Of a stream: a row cannot be used, or cannot be read. No prompt is taken then, and what came from
                the buffer comes first the next time.
        """
        resumed = min(num_groups, len(self._unfinished))
        groups = self._take_buffered(num_groups - resumed)
        groups = [*(self._unfinished.popleft() for _ in range(resumed)), *groups]
        try:
            groups += self._fresh_groups(num_groups - len(groups))
        except BaseException:
            self._unfinished.extendleft(reversed(groups))
            raise
        self._ledger.hand_out(groups)
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back. Without a buffer they are dropped, and count as aborted."""
        logger.debug("%d groups given back to a data source without a buffer are dropped", len(groups))
        self._ledger.settle(groups, Fate.ABORTED)

    def fresh_index(self) -> int:
        """A number that no sample has or will have: for further training samples of a trajectory."""
        number = self._next_sample
        self._next_sample += 1
        return number

    def check_ledger(self, in_flight: Iterable[Group] = ()) -> str | None:
        """What of the samples is lost or doubled, or ``None``. For use between rollouts.

        Args:
            in_flight: What is rightly out then.
        """
        return self._ledger.problem(chain(self._unfinished, self._buffered()), in_flight)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values that share nothing with this object: position, ledger, all unfinished groups.

        Raises:
            DataError: A sample that is out or in the buffer has an invalid field.
        """
        return {
            "data": self._feed.identity,
            "epoch": self._feed.epoch,
            "position": self._feed.position,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "ledger": self._ledger.state_dict(),
            "unfinished": plain_groups(chain(self._ledger.out_groups(), self._unfinished)),
            "buffer": plain_groups(self._buffered()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly what came next when ``state`` was taken, after what was out at that time.

        Groups that this object handed out before cannot be given back afterwards.

        Raises:
            DataError: The state belongs to other prompts, another order of them or another class, or is incomplete. The
                source is then as it was.
        """
        self._check_state(state)
        unfinished, buffer = groups_from_plain(state["unfinished"]), groups_from_plain(state["buffer"])
        self._ledger.load_state_dict(state["ledger"], chain(unfinished, buffer))
        self._feed.seek(state["epoch"], state["position"])
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._unfinished = deque(unfinished)
        self._fill_buffer(buffer)

    def _check_state(self, state: dict[str, Any]) -> None:
        if missing := [name for name in _ENTRIES if name not in state]:
            raise DataError(f"the saved data position lacks {', '.join(missing)}; start a new run")
        identity = self._feed.identity
        if state["data"] != identity:
            changed = {key: (state["data"].get(key), now) for key, now in identity.items()}
            text = ", ".join(f"{key} {old} → {now}" for key, (old, now) in changed.items() if old != now)
            raise DataError(
                f"the saved data position belongs to other prompts or another order ({text}); continue with the same "
                "prompt file, tokenizer, --streaming-data, --rollout-shuffle and --rollout-seed, or start a new run"
            )
        if state["buffer"] and not self._has_buffer():
            raise DataError(
                f"the saved state has {len(state['buffer'])} groups in a buffer, and {type(self).__name__} has none; "
                "continue with the same --data-source-path"
            )

    def _has_buffer(self) -> bool:
        """Whether groups can be given back."""
        return False

    def _buffered(self) -> list[Group]:
        """What was given back."""
        return []

    def _take_buffered(self, num_groups: int) -> list[Group]:
        """At most so many groups of what was given back."""
        return []

    def _fill_buffer(self, groups: list[Group]) -> None:
        """Continue with this buffer."""

    def _fresh_groups(self, num_groups: int) -> list[Group]:
        """All of them, or the feed's error and none."""
        place = self._feed.epoch, self._feed.position
        try:
            groups = [
                self._feed.next_group(
                    group_index=self._next_group + number,
                    first_index=self._next_sample + number * self._size,
                    size=self._size,
                )
                for number in range(num_groups)
            ]
        except BaseException:
            self._feed.seek(*place)
            raise
        self._next_group += num_groups
        self._next_sample += num_groups * self._size
        return groups
