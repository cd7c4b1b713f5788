"""Rows to tokenized prompts, in this process or ahead in others; data in memory, and the feeds that hand out groups."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

import orjson

from slime_core.errors import DataError
from slime_core.types import Group, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder, load_tokenizer
from slime_rollout.data.files import PromptFile, RawRow
from slime_rollout.data.group_state import copied_value
from slime_rollout.data.rows import PromptRow, check_row, usable
from slime_rollout.limits import ModelLimits

logger = logging.getLogger(__name__)
T = TypeVar("T")
DatasetT = TypeVar("DatasetT", bound="Dataset[Any]")

CHUNK = 32
"""Rows that a process takes at once."""
_CHUNKS_AHEAD = 2  # for each process: one in work and one that waits
_PARENT_CHECK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A row of the file and the token ids of its prompt."""

    row: PromptRow
    tokens: list[int]


Outcome = TokenizedPrompt | DataError
"""A row's prompt, or why it is bad."""


class RowEncoder:
    """Checks and tokenizes rows, each when it is asked for, or ahead in other processes.

    The ``processes`` start with the first rows and load tokenizers of their own. They end with :meth:`close`, with the
    last reference to this object, or with this process, however it ends. If one dies, that is a `DataError`, and later
    rows get new processes. As always with `multiprocessing`, a script needs ``if __name__ == "__main__"``.
    """

    def __init__(self, config: RolloutConfig, encoder: PromptEncoder, processes: int = 0) -> None:
        self._config, self._encoder, self._processes = config, encoder, processes
        self._executor: ProcessPoolExecutor | None = None
        self._limits, self._longest = ModelLimits.of(config.data.hf_checkpoint), longest_prompt(config)

    def outcome(self, raw: RawRow) -> Outcome:
        """A row's prompt, or why it is bad, which the model's limits may be, too, unless it is left out as too long."""
        try:
            row = check_row(raw, self._config)
        except DataError as error:
            return error
        try:
            tokens = self._encoder.encode(row.prompt, row.tools)
            self._check(tokens)
        except DataError as error:
            return DataError(f"{row.where}: {error}")
        return TokenizedPrompt(row=row, tokens=tokens)

    def _check(self, tokens: list[int]) -> None:
        given = self._config.data.rollout_max_prompt_len
        if given is not None and len(tokens) > given:
            return
        if problem := self._limits.token_problem(tokens, self._encoder.tokenizer):
            raise DataError(f"the prompt's {problem}")
        if self._longest is not None and len(tokens) > self._longest:
            raise DataError(
                f"the prompt has {len(tokens)} tokens, and with a response the context holds {self._longest} of a "
                f"prompt; shorten it, or leave such rows out with --rollout-max-prompt-len {self._longest}"
            )

    def outcomes(self, rows: Iterable[tuple[T, RawRow]]) -> Iterator[tuple[T, Outcome]]:
        """The outcome of each row, in their order, each with the value that came along with it.

        What ``rows`` raises comes after the outcomes of all rows before. Raises `DataError` if a process died.
        """
        if self._processes:
            yield from self._outcomes_ahead(rows)
        else:
            for along, raw in rows:
                yield along, self.outcome(raw)

    def close(self) -> None:
        """End the processes, after the chunks that they are at."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def _outcomes_ahead(self, rows: Iterable[tuple[T, RawRow]]) -> Iterator[tuple[T, Outcome]]:
        executor = self._executor = self._executor or self._start()
        chunks = _chunks(rows)
        pending: deque[tuple[list[tuple[T, RawRow]], Future[list[Outcome]], DataError | None]] = deque()
        where = "the first rows"
        try:
            while True:
                while len(pending) < self._processes * _CHUNKS_AHEAD and (chunk := next(chunks, None)) is not None:
                    pairs, error = chunk
                    pending.append((pairs, executor.submit(_encode, [raw for _, raw in pairs]), error))
                if not pending:
                    return
                pairs, future, error = pending.popleft()
                where = pairs[0][1].where if pairs else where
                for (along, _), outcome in zip(pairs, future.result(), strict=True):
                    yield along, outcome
                if error is not None:
                    raise error
        except (BrokenProcessPool, OSError) as error:
            if self._executor is executor:
                self._executor = None
            raise DataError(
                f"a process of --num-data-workers died or could not start while it tokenized {where} and what follows "
                f"({error}); if it lacked memory, give fewer processes"
            ) from None
        finally:
            for _, future, _ in pending:
                future.cancel()

    def _start(self) -> ProcessPoolExecutor:
        # Not forked: this process has threads.
        return ProcessPoolExecutor(
            self._processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(self._config, os.getpid())
        )


def longest_prompt(config: RolloutConfig) -> int | None:
    """Tokens of the longest prompt that can be answered; ``None`` if unknown, or where a function may shorten them."""
    if config.sampling.custom_generate_function_path is not None or config.rollout_function is not None:
        return None
    limits = ModelLimits.of(config.data.hf_checkpoint)
    return limits.longest_prompt(config.sampling.rollout_max_context_len)


def _chunks(rows: Iterable[tuple[T, RawRow]]) -> Iterator[tuple[list[tuple[T, RawRow]], DataError | None]]:
    """Rows in chunks; the last one with the error that ended them, if one did."""
    chunk: list[tuple[T, RawRow]] = []
    try:
        for pair in rows:
            chunk.append(pair)
            if len(chunk) == CHUNK:
                yield chunk, None
                chunk = []
    except DataError as error:
        yield chunk, error
        return
    if chunk:
        yield chunk, None


_config: RolloutConfig | None = None
_encoder: RowEncoder | None = None


def _begin(config: RolloutConfig, parent: int) -> None:
    """Prepare one of the other processes."""
    global _config
    _config = config
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # no warning that torch is missing
    # transformers imports torch wherever it finds it, for seconds and hundreds of MiB; tokenizing does not need it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """An executor's processes wait without end for a parent that was killed."""
    while os.getppid() == parent:  # parent_process().join() waits for forks of the parent, too
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(0)


def _encode(rows: list[RawRow]) -> list[Outcome]:
    """In one of the other processes. The tokenizer is loaded here, so that an error of it is the rows' error."""
    global _encoder
    if _encoder is None:
        assert _config is not None
        data = _config.data
        tokenizer = load_tokenizer(data.hf_checkpoint, trust_remote_code=data.trust_remote_code)
        _encoder = RowEncoder(_config, PromptEncoder.of(_config, tokenizer))
    return [_encoder.outcome(raw) for raw in rows]


class Dataset(ABC, Generic[T]):
    """Data in memory, in the file's order: prompts, conversations or preference pairs, at least one."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = list(items)
        if not self._items:
            raise DataError("a data set needs at least one row")
        self._sizes = [len(self._items)]
        self._weights: list[float] | None = None
        self.notices: tuple[str, ...] = ()  # what was left out or cut, a line for each file

    @staticmethod
    def join(parts: Sequence[DatasetT], weights: Sequence[float] | None = None) -> DatasetT:
        """Several data sets as one; with ``weights``, an epoch's items are shared as :func:`epoch_order` says."""
        joined = copy.copy(parts[0])
        joined._items = [item for part in parts for item in part._items]
        joined._sizes = [len(part) for part in parts]
        joined._weights = list(weights) if weights else None
        joined.notices = tuple(notice for part in parts for notice in part.notices)
        return joined

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

    def groups(self, size: int) -> list[Group]:
        """Fresh samples of every place, ``size`` of each, with the same numbers every time."""
        return [self.group(place, group_index=place, first_index=place * size, size=size) for place in range(len(self))]

    @abstractmethod
    def _hashed(self, item: T) -> Any:
        """The part of an item that the digest depends on, as plain values."""


def all_too_long(path: str, lengths: Sequence[int], limit: int | None) -> DataError:
    """The error of a file without a prompt within the limit."""
    return DataError(
        f"{path}: all {len(lengths)} prompts are longer than --rollout-max-prompt-len {limit}; the shortest has "
        f"{min(lengths)} tokens"
    )


class PromptDataset(Dataset[TokenizedPrompt]):
    """Tokenized prompts."""

    @classmethod
    def load(
        cls, path: str, config: RolloutConfig, encoder: PromptEncoder, *, encoding: RowEncoder | None = None
    ) -> PromptDataset:
        """Read a file without prompts over ``--rollout-max-prompt-len``; `DataError` if invalid, or none is left."""
        outcomes = (encoding or RowEncoder(config, encoder)).outcomes(PromptFile(path).rows())
        prompts = usable(path, (outcome for _, outcome in outcomes), config.data.on_bad_data)
        limit = config.data.rollout_max_prompt_len
        kept = [prompt for prompt in prompts if limit is None or len(prompt.tokens) <= limit]
        if not kept:
            raise all_too_long(path, [len(prompt.tokens) for prompt in prompts], limit)
        if left_out := len(prompts) - len(kept):
            logger.warning("%s: left out %d of %d prompts, longer than %s tokens", path, left_out, len(prompts), limit)
        return cls(kept)

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """Fresh samples of one prompt, numbered from ``first_index``."""
        return fresh_group(self._items[place], group_index=group_index, first_index=first_index, size=size)

    def _hashed(self, item: TokenizedPrompt) -> Any:
        return [item.row.prompt, item.row.label, item.row.metadata, item.tokens]


class DatasetFeed:
    """Epoch after epoch of data in memory. An epoch's order depends on its number, the seed and the data alone.

    ``identity`` says what a saved place belongs to; ``epoch`` and ``position`` are the place of the next prompt.
    """

    def __init__(self, dataset: Dataset[Any], *, shuffle: bool, seed: int) -> None:
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self.identity = {"prompts": len(dataset), "digest": dataset.digest, "shuffle": shuffle, "seed": seed}
        self.epoch = -1
        self.seek(0, 0)

    def seek(self, epoch: int, position: Any) -> None:
        """Go to a place that was saved."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._order = self._dataset.epoch_order(epoch, shuffle=self._shuffle, seed=self._seed)
        self.position = position

    def next_group(self, *, group_index: int, first_index: int, size: int) -> Group:
        """Fresh samples of the next prompt, numbered from ``first_index``."""
        if self.position == len(self._order):
            self.seek(self.epoch + 1, 0)
        place = self._order[self.position]
        self.position += 1
        return self._dataset.group(place, group_index=group_index, first_index=first_index, size=size)


def epoch_order(
    sizes: Sequence[int], weights: Sequence[float] | None, *, epoch: int, shuffle: bool, seed: int
) -> list[int]:
    """Places of the prompts in one epoch, where the data sets lie one behind the other.

    Without weights every prompt comes once. With weights (only their ratios count), an epoch has as many prompts
    as the data sets together, up to rounding, and each data set its share of them, at least one. A data set goes
    through its own prompts lap by lap, whatever epoch that falls into: each comes once before any comes again.
    Unshuffled, the shares are spread evenly over the epoch.
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
    """How many prompts of an epoch each data set gives."""
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


def fresh_group(prompt: TokenizedPrompt, *, group_index: int, first_index: int, size: int) -> Group:
    """Samples of one prompt, numbered from ``first_index``, which share nothing."""
    return [
        Sample(
            index=first_index + offset,
            group_index=group_index,
            prompt=copied_value(prompt.row.prompt),
            label=prompt.row.label,
            tokens=list(prompt.tokens),
            metadata=copied_value(prompt.row.metadata),
        )
        for offset in range(size)
    ]
