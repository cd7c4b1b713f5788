"""Where groups come from: epoch after epoch of prompts, what was given back, and an account of every sample."""

from __future__ import annotations

import abc
import hashlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import Group
from slime_rollout.data.dataset import Dataset
from slime_rollout.data.group_state import groups_from_plain, plain_groups
from slime_rollout.data.ledger import Fate, Ledger
from slime_rollout.data.stream import StreamingPrompts

logger = logging.getLogger(__name__)

BufferFilter = Callable[[HookArgs, list[Group], int], list[Group]]

_ENTRIES = ("data", "epoch", "position", "next_group", "next_sample", "ledger", "unfinished", "buffer")


class AccountedSource(abc.ABC):
    """Groups with an account of each sample, from when it is handed out until it is settled or given back.

    What it hands out is out until :attr:`ledger` records how it ended: `RolloutManager` does that for each rollout.
    What is out when the state is saved is part of it, unfinished responses included, and is handed out first after
    loading.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        """Where every sample of this source went."""
        self._unfinished: deque[Group] = deque()
        self._buffer: deque[Group] = deque()  # what was given back and waits

    def get_samples(self, num_groups: int) -> list[Group]:
        """The next groups: first those that were out when a loaded state was saved, then others.

        A `DataError` on a bad row of a stream consumes no prompt; groups from the buffer come first the next time.
        """
        resumed = [self._unfinished.popleft() for _ in range(min(num_groups, len(self._unfinished)))]
        try:
            groups = resumed + self._next_groups(num_groups - len(resumed))
        except BaseException:
            self._unfinished.extendleft(reversed(resumed))
            raise
        self.ledger.hand_out(groups)
        return groups

    @abc.abstractmethod
    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back."""

    @abc.abstractmethod
    def begin(self) -> Callable[[], None]:
        """Begin a transaction; the result undoes all hand-outs and settlements since, but no changes of samples."""

    def take_back(self) -> None:
        """Hand out first, as it stands, what is out now: whoever had it has stopped."""
        groups = self.ledger.out_groups()
        self.ledger.put_back(groups)
        self._unfinished.extendleft(reversed(groups))

    @abc.abstractmethod
    def fresh_index(self) -> int:
        """A number that no sample has or will have: for further training samples of a trajectory."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was saved."""

    def check_ledger(self, in_flight: Iterable[Group] = ()) -> str | None:
        """Between rollouts: which samples are lost or doubled, if any; ``in_flight`` is rightly out."""
        return self.ledger.problem(chain(self._unfinished, self._buffer), in_flight)

    @abc.abstractmethod
    def _next_groups(self, num_groups: int) -> list[Group]:
        """So many groups, or an error and none."""


class NoPrompts(AccountedSource):
    """The source of a run that only evaluates: it has nothing to hand out."""

    def add_samples(self, groups: list[Group]) -> None:
        """Nothing was handed out."""

    def begin(self) -> Callable[[], None]:
        """As for `AccountedSource`."""
        return lambda: None

    def fresh_index(self) -> int:
        """As for `AccountedSource`."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`state_dict`."""

    def _next_groups(self, num_groups: int) -> list[Group]:
        raise DataError("there are no prompts to generate for; give --prompt-data")


class RolloutDataSource(AccountedSource):
    """Endless groups of fresh samples, one group per prompt. `RolloutDataSourceWithBuffer` keeps what is given back.

    A batch may be larger than the data set, and may span epochs, each shuffled, if at all, by its own order. ``args``
    holds every flag by its name, for subclasses and their hooks.
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
        super().__init__()
        self.args = args or HookArgs({})
        self._size = samples_per_prompt
        self._seed = seed
        self._feed = dataset.feed(shuffle=shuffle, seed=seed)
        self._next_group = self._next_sample = self._choices = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next fresh prompt, from 0."""
        return self._feed.epoch

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back. Without a buffer they are dropped, and count as aborted."""
        logger.debug("%d groups given back to a data source without a buffer are dropped", len(groups))
        self.ledger.settle(groups, Fate.ABORTED)

    def fresh_index(self) -> int:
        """As for `AccountedSource`."""
        self._next_sample += 1
        return self._next_sample - 1

    def begin(self) -> Callable[[], None]:
        """As for `AccountedSource`."""
        place, numbers = (self._feed.epoch, self._feed.position), (self._next_group, self._next_sample, self._choices)
        ledger, unfinished, buffer = self.ledger.copy(), self._unfinished.copy(), self._buffer.copy()

        def undo() -> None:
            self._feed.seek(*place)
            self._next_group, self._next_sample, self._choices = numbers
            self.ledger, self._unfinished, self._buffer = ledger, unfinished, buffer

        return undo

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values that share nothing with this object: position, ledger, all unfinished groups.

        Raises `DataError` if a sample that is out or in the buffer has an invalid field.
        """
        return {
            "data": dict(self._feed.identity),
            "epoch": self._feed.epoch,
            "position": self._feed.position,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "ledger": self.ledger.state_dict(),
            "unfinished": plain_groups(chain(self.ledger.out_groups(), self._unfinished)),
            "buffer": plain_groups(self._buffer),
            "choices": self._choices,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly what came next when ``state`` was saved, after what was out at that time.

        Raises `DataError` if the state belongs to other prompts, another order of them or another class, or is
        incomplete. The source is then as it was.
        """
        self._check_state(state)
        unfinished, buffer = groups_from_plain(state["unfinished"]), groups_from_plain(state["buffer"])
        self.ledger.load_state_dict(state["ledger"], chain(unfinished, buffer))
        self._feed.seek(state["epoch"], state["position"])
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._choices = state.get("choices", 0)
        self._unfinished, self._buffer = deque(unfinished), deque(buffer)

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
        if state["buffer"] and not isinstance(self, RolloutDataSourceWithBuffer):
            raise DataError(
                f"the saved state has {len(state['buffer'])} groups in a buffer, and {type(self).__name__} has none; "
                "continue with the same --data-source-path"
            )

    def _next_groups(self, num_groups: int) -> list[Group]:
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


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Groups that are given back come first, chosen by :meth:`buffer_filter`; then fresh ones.

    Without over-sampling, `RolloutManager` gives nothing back by itself. Subclasses and callers may:
    ``manager.source.add_samples(groups)`` between rollouts, with groups of ``manager.source.get_samples``. The manager
    then keeps responses that are finished and rewards that are there, and generates the others again.

    A state holds the whole buffer with unfinished responses, and :attr:`random`'s place. A subclass with a state of its
    own adds it in `state_dict` and `load_state_dict`.

    Args are those of `RolloutDataSource`, and ``filter``: a function ``(args, buffer, num_samples)`` that chooses in
    place of :meth:`buffer_filter`'s own rule.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | StreamingPrompts,
        *,
        samples_per_prompt: int,
        shuffle: bool = False,
        seed: int = 0,
        args: HookArgs | None = None,
        filter: BufferFilter | None = None,
    ) -> None:
        super().__init__(dataset, samples_per_prompt=samples_per_prompt, shuffle=shuffle, seed=seed, args=args)
        self._filter = filter
        self._is_fifo = filter is None and type(self).buffer_filter is RolloutDataSourceWithBuffer.buffer_filter

    @property
    def random(self) -> random.Random:
        """A generator for :meth:`buffer_filter`, seeded again for each choice, so that a resumed run chooses alike."""
        seed = hashlib.blake2b(f"{self._seed}:choice:{self._choices}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(seed, "big"))

    def buffer_filter(self, args: HookArgs, buffer: list[Group], num_samples: int) -> list[Group]:
        """Choose what to hand out again. To be overridden; by default the groups that came back first.

        ``buffer`` is a list of its own, oldest first. Groups that are removed from it and not returned are dropped for
        good, and count as filtered. Returned are at most ``num_samples`` of its groups, removed from it or not; the
        source removes them. Fresh ones make up for the rest.
        """
        if self._filter is not None:
            return self._filter(args, buffer, num_samples)
        return buffer[:num_samples]

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back, whole or in part, finished or not.

        Raises `DataError` if a sample is not out: trained on, dropped or given back before. Nothing is added then.
        """
        groups = [group for group in groups if group]
        self.ledger.put_back(groups)
        self._buffer.extend(groups)

    def _next_groups(self, num_groups: int) -> list[Group]:
        buffered = self._take_buffered(num_groups)
        try:
            return buffered + super()._next_groups(num_groups - len(buffered))
        except BaseException:
            self._unfinished.extendleft(reversed(buffered))
            raise

    def _take_buffered(self, num_groups: int) -> list[Group]:
        if not self._buffer or num_groups == 0:
            return []
        if self._is_fifo:  # what the general way would give, without looking through the whole buffer
            return [self._buffer.popleft() for _ in range(min(num_groups, len(self._buffer)))]
        offered = list(self._buffer)
        chosen = self._choose(offered, num_groups)
        taken, kept = set(map(id, chosen)), set(map(id, offered))
        dropped = [group for group in self._buffer if id(group) not in taken and id(group) not in kept]
        self._buffer = deque(group for group in self._buffer if id(group) in kept and id(group) not in taken)
        self.ledger.drop_buffered(dropped)
        self._choices += 1
        return chosen

    def _choose(self, offered: list[Group], num_groups: int) -> list[Group]:
        name = "--buffer-filter-path" if self._filter is not None else f"{type(self).__name__}.buffer_filter"
        try:
            chosen: Any = self.buffer_filter(self.args, offered, num_groups)
        except Exception as error:
            raise DataError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(chosen, list):
            raise DataError(f"{name} returned {type(chosen).__name__}; return a list of groups of the buffer")
        if len(chosen) > num_groups:
            raise DataError(f"{name} returned {len(chosen)} groups; return {num_groups} at most")
        own = set(map(id, self._buffer))
        if any(id(group) not in own for group in chosen):
            raise DataError(f"{name} returned a group that is not in the buffer; return its groups as they are")
        if len(set(map(id, chosen))) < len(chosen):
            raise DataError(f"{name} returned a group twice; return each once")
        return list(chosen)
