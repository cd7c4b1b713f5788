"""Data in memory, and the feeds that a data source draws fresh groups from."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import orjson

from slime_core.errors import DataError
from slime_core.types import Group
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder
from slime_rollout.data.encode import RowEncoder, TokenizedPrompt, fresh_group
from slime_rollout.data.files import PromptFile
from slime_rollout.data.rows import usable

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Feed(Protocol):
    """Endless fresh groups in a fixed order, and a position that can be saved."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a saved position belongs to, as plain values: data, order and seed."""

    @property
    def epoch(self) -> int:
        """The epoch of the last prompt; where an epoch begins, of the next one. From 0."""

    @property
    def position(self) -> Any:
        """The place in that epoch, as plain values that share nothing with this object."""

    def seek(self, epoch: int, position: Any) -> None:
        """Go to a place that :attr:`epoch` and :attr:`position` named before."""

    def next_group(self, *, group_index: int, first_index: int, size: int) -> Group:
        """Fresh samples of the next prompt, numbered from ``first_index``.

        Raises:
            DataError: There is none, because of a row that cannot be used. The position stays before that row.
        """


class Dataset(ABC, Generic[T]):
    """Data in memory, in the file's order: prompts, conversations or preference pairs, at least one."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = list(items)
        if not self._items:
            raise DataError("a data set needs at least one row")
        self._sizes = [len(self._items)]
        self._weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def digest(self) -> str:
        """A hash of all items and weights: equal for equal data sets, in every process."""
        hasher = hashlib.blake2b(digest_size=16)
        if self._weights is not None:
            hasher.update(orjson.dumps([self._sizes, self._weights]))
        for item in self._items:
            hasher.update(orjson.dumps(self._hashed(item)))
        return hasher.hexdigest()

    def feed(self, *, shuffle: bool, seed: int) -> DatasetFeed:
        """Its groups from the beginning on, each epoch shuffled by its own order if ``shuffle``."""
        return DatasetFeed(self, shuffle=shuffle, seed=seed)

    def epoch_order(self, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
        """Places of the items that one epoch hands out, in order; see :func:`epoch_order`."""
        return epoch_order(self._sizes, self._weights, epoch=epoch, shuffle=shuffle, seed=seed)

    @abstractmethod
    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """Fresh samples of one place from 0, numbered from ``first_index``."""

    @abstractmethod
    def _hashed(self, item: T) -> Any:
        """What the digest depends on, as plain values."""


class PromptDataset(Dataset[TokenizedPrompt]):
    """Tokenized prompts."""

    @classmethod
    def load(
        cls, path: str, config: RolloutConfig, encoder: PromptEncoder, *, encoding: RowEncoder | None = None
    ) -> PromptDataset:
        """Read, check and tokenize a file, leaving out prompts longer than ``--rollout-max-prompt-len``.

        Rows that cannot be used are an error; with ``--on-bad-data skip`` they are logged. ``encoding`` tokenizes
        them with the same config and tokenizer; unset: this process.

        Raises:
            DataError: The file breaks its format, or no prompt is short enough.
        """
        rows = ((None, raw) for _, raw in PromptFile(path).rows())
        outcomes = (encoding or RowEncoder(config, encoder)).outcomes(rows)
        prompts = usable(path, (outcome for _, outcome in outcomes), config.data.on_bad_data)
        limit = config.data.rollout_max_prompt_len
        kept = [prompt for prompt in prompts if limit is None or len(prompt.tokens) <= limit]
        if not kept:
            shortest = min(len(prompt.tokens) for prompt in prompts)
            raise DataError(
                f"{path}: all {len(prompts)} prompts are longer than --rollout-max-prompt-len {limit}; "
                f"the shortest has {shortest} tokens"
            )
        if left_out := len(prompts) - len(kept):
            logger.warning("%s: left out %d of %d prompts, longer than %s tokens", path, left_out, len(prompts), limit)
        return cls(kept)

    @classmethod
    def join(cls, parts: Sequence[PromptDataset], weights: Sequence[float] | None = None) -> PromptDataset:
        """Several data sets as one; with ``weights``, an epoch's prompts are shared as :func:`epoch_order` says."""
        joined = cls(prompt for part in parts for prompt in part._items)
        joined._sizes = [len(part) for part in parts]
        joined._weights = list(weights) if weights else None
        return joined

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """Fresh samples of one prompt, numbered from ``first_index``."""
        return fresh_group(self._items[place], group_index=group_index, first_index=first_index, size=size)

    def _hashed(self, item: TokenizedPrompt) -> Any:
        return [item.row.prompt, item.row.label, item.row.metadata, item.tokens]


class DatasetFeed:
    """Epoch after epoch of data in memory. Implements `Feed`.

    The order of an epoch depends on its number, the seed and the data alone (see :func:`epoch_order`), so the
    epoch's number and the position in it are all that has to be saved.
    """

    def __init__(self, dataset: Dataset[Any], *, shuffle: bool, seed: int) -> None:
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._identity = {"prompts": len(dataset), "digest": dataset.digest, "shuffle": shuffle, "seed": seed}
        self.epoch = self.position = 0
        self._order = self._epoch_order()

    @property
    def identity(self) -> dict[str, Any]:
        """As for `Feed`."""
        return dict(self._identity)

    def seek(self, epoch: int, position: int) -> None:
        """As for `Feed`."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._order = self._epoch_order()
        self.position = position

    def next_group(self, *, group_index: int, first_index: int, size: int) -> Group:
        """As for `Feed`; never fails."""
        if self.position == len(self._order):
            self.seek(self.epoch + 1, 0)
        place = self._order[self.position]
        self.position += 1
        return self._dataset.group(place, group_index=group_index, first_index=first_index, size=size)

    def _epoch_order(self) -> list[int]:
        return self._dataset.epoch_order(self.epoch, shuffle=self._shuffle, seed=self._seed)


def epoch_order(
    sizes: Sequence[int], weights: Sequence[float] | None, *, epoch: int, shuffle: bool, seed: int
) -> list[int]:
    """Places of the prompts in one epoch, where the data sets lie one behind the other.

    Without weights every prompt comes once. With weights an epoch has as many prompts as the data sets together, up
    to rounding, and each data set its share of them, at least one. A data set goes through its own prompts lap by lap,
    whatever epoch that falls into: each comes once before any comes again.

    Args:
        sizes: Prompts of each data set.
        weights: Weight of each data set, above 0; only their ratios count.
        epoch: From 0.
        shuffle: Sort by hash; otherwise the files' order, with the shares spread evenly over the epoch.
        seed: Seed of the shuffle.
    """
    if weights is None:
        places = list(range(sum(sizes)))
        return sorted(places, key=lambda place: rank(f"{seed}:{epoch}:{place}")) if shuffle else places
    shares = epoch_shares(sizes, weights)
    slots: list[tuple[bytes | float, int, int]] = []
    starts = [0, *accumulate(sizes)]
    for part, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        for draw, place in enumerate(_draws(size, share, epoch, f"{seed}:{part}" if shuffle else None)):
            key = rank(f"{seed}:{epoch}:{part}:{draw}") if shuffle else (draw + 0.5) / share
            slots.append((key, part, starts[part] + place))
    return [place for _, _, place in sorted(slots, key=lambda slot: slot[:2])]


def epoch_shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many prompts of an epoch each data set gives: its weight's part of all, at least one."""
    total, whole = sum(sizes), sum(weights)
    return [max(1, round(total * (weight / whole))) for weight in weights]


def _draws(size: int, share: int, epoch: int, salt: str | None) -> Iterator[int]:
    """Places in one data set, going on where the epoch before stopped."""
    first, order, lap = epoch * share, list(range(size)), -1
    for draw in range(first, first + share):
        if salt is not None and draw // size != lap:
            lap = draw // size
            order.sort(key=lambda place: rank(f"{salt}:{lap}:{place}"))
        yield order[draw % size]


def rank(text: str) -> bytes:
    """A key to shuffle by: the same for the same text in every process and Python version, where generators differ."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
