"""Prompts read from their files as they are needed, in bounded memory, with a position that can be saved.

    files ─▶ rows of one pass after another ─▶ shuffled block by block ─▶ tokenized, perhaps ahead ─▶ groups

Nothing is known of rows ahead: neither how many there are, nor whether they can be used. The order therefore depends on
the rows alone: a prompt that is left out has no other effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Group
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder
from slime_rollout.data.dataset import Outcome, RowEncoder, TokenizedPrompt, fresh_group, rank
from slime_rollout.data.files import Mark, PromptFile, RawRow, split_slice

logger = logging.getLogger(__name__)

_LOGGED = 3  # bad rows of a pass that are logged one by one, before only every tenth, hundredth … is


@dataclasses.dataclass(frozen=True)
class _Cursor:
    """Which row comes next."""

    lap: int = 0  # passes through all files before
    file: int = 0
    mark: Mark = dataclasses.field(default_factory=Mark)  # where the block begins: one row if they are not shuffled
    number: int = 0  # rows of this pass before the mark
    done: int = 0  # rows of the block that were handed out, in its shuffled order


@dataclasses.dataclass
class _Counts:
    """Rows of one pass: handed out, skipped as bad, left out as too long."""

    used: int = 0
    bad: int = 0
    long: int = 0

    @property
    def rows(self) -> int:
        return self.used + self.bad + self.long


def _lap(files: Sequence[PromptFile], cursor: _Cursor) -> Iterator[tuple[_Cursor, RawRow]]:
    """The rest of a pass in the files' order, each row with what comes after it."""
    number, begin = cursor.number, cursor.mark
    for place in range(cursor.file, len(files)):
        for mark, raw in files[place].rows(begin):
            number += 1
            yield _Cursor(cursor.lap, place, mark, number), raw
        begin = Mark()


def _shuffled_lap(
    files: Sequence[PromptFile], cursor: _Cursor, block: int, salt: str
) -> Iterator[tuple[_Cursor, RawRow]]:
    """The same in blocks of so many rows, each shuffled by itself."""
    start, done = dataclasses.replace(cursor, done=0), cursor.done
    rows = _lap(files, start)
    while held := list(islice(rows, block)):
        ranks = [rank(f"{salt}:{start.lap}:{start.number + place}") for place in range(len(held))]
        order = sorted(range(len(held)), key=ranks.__getitem__)
        end = held[-1][0]
        for place in range(done, len(held)):
            after = dataclasses.replace(start, done=place + 1) if place + 1 < len(held) else end
            yield after, held[order[place]][1]
        start, done = end, 0
        held = []  # before the next block is read


class _Lane:
    """One data set, or several behind each other, pass after pass; each ``block`` of rows is shuffled."""

    def __init__(
        self, files: Sequence[PromptFile], encoding: RowEncoder, *, block: int, salt: str, config: RolloutConfig
    ) -> None:
        self._files, self._encoding, self._block, self._salt = files, encoding, block, salt
        self._limit, self._skips = config.data.rollout_max_prompt_len, config.data.on_bad_data == "skip"
        self._cursor, self._counts = _Cursor(), _Counts()
        self._outcomes: Iterator[tuple[_Cursor, Outcome]] | None = None
        self.drawn = 0

    @property
    def lap(self) -> int:
        """The pass of the last prompt."""
        return self._cursor.lap

    def next(self) -> TokenizedPrompt:
        """The next prompt that can be used. If a bad row comes first it raises, and does so again the next time."""
        try:
            if self._outcomes is None:
                self._outcomes = self._encoding.outcomes(self._rows())
            for cursor, outcome in self._outcomes:
                if cursor.lap != self._cursor.lap:
                    self._end_lap(cursor.lap)
                usable = self._judge(outcome)
                self._cursor = cursor
                if usable is not None:
                    self.drawn += 1
                    return usable
        except BaseException:
            self._outcomes = None
            raise
        raise AssertionError("passes have no end")

    def state(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self._cursor), **dataclasses.asdict(self._counts), "drawn": self.drawn}

    def load(self, state: dict[str, Any]) -> None:
        if state == self.state():
            return  # keep what was read ahead
        mark = Mark(**state["mark"])
        self._cursor = _Cursor(state["lap"], state["file"], mark, state["number"], state["done"])
        self._counts = _Counts(state["used"], state["bad"], state["long"])
        self.drawn = state["drawn"]
        self._outcomes = None

    def _rows(self) -> Iterator[tuple[_Cursor, RawRow]]:
        cursor = self._cursor
        while True:
            yield from _shuffled_lap(self._files, cursor, self._block, self._salt)
            cursor = _Cursor(lap=cursor.lap + 1)

    def _judge(self, outcome: Outcome) -> TokenizedPrompt | None:
        if isinstance(outcome, DataError):
            if not self._skips:
                raise DataError(f"{outcome} (or leave such rows out with --on-bad-data skip)")
            self._counts.bad += 1
            bad = self._counts.bad
            if bad <= _LOGGED or bad == 10 ** (len(str(bad)) - 1):
                logger.warning("skipped %d of %d rows so far: %s", bad, self._counts.rows, outcome)
            return None
        if self._limit is not None and len(outcome.tokens) > self._limit:
            self._counts.long += 1
            return None
        self._counts.used += 1
        return outcome

    def _end_lap(self, following: int) -> None:
        counts, names = self._counts, ", ".join(file.path for file in self._files)
        reasons = f"{counts.bad} bad, {counts.long} longer than --rollout-max-prompt-len {self._limit}"
        if not counts.used:
            raise DataError(f"{names}: none of the {counts.rows} rows can be used: {reasons}")
        if counts.bad or counts.long:
            logger.warning("%s: epoch %d left out rows of %d: %s", names, following - 1, counts.rows, reasons)
        self._counts = _Counts()
        self._cursor = _Cursor(lap=following)


class StreamFeed:
    """Endless groups of a stream, with the attributes and methods of a `DatasetFeed`.

    Without weights the data sets come one behind the other. With weights the next one is the one furthest behind its
    share of what was handed out, which spreads them evenly; each has epochs of its own.
    """

    def __init__(self, lanes: Sequence[_Lane], weights: Sequence[float], identity: dict[str, Any]) -> None:
        self._lanes, self._weights, self.identity = lanes, weights, identity

    @property
    def epoch(self) -> int:
        """The epoch of the slowest data set."""
        return min(lane.lap for lane in self._lanes)

    @property
    def position(self) -> list[dict[str, Any]]:
        """For each data set drawn from: file, row, place in the file and in the shuffled block, and counts."""
        return [lane.state() for lane in self._lanes]

    def seek(self, epoch: int, position: Any) -> None:
        """Go to a saved place. What was read or tokenized ahead is dropped, unless that is the current place."""
        for lane, state in zip(self._lanes, position, strict=True):
            lane.load(state)

    def next_group(self, *, group_index: int, first_index: int, size: int) -> Group:
        """Fresh samples of the next prompt; a `DataError` if its row cannot be used, and the place stays before it."""
        _, place = min(
            ((lane.drawn + 0.5) / weight, place)
            for place, (lane, weight) in enumerate(zip(self._lanes, self._weights, strict=True))
        )
        prompt = self._lanes[place].next()
        return fresh_group(prompt, group_index=group_index, first_index=first_index, size=size)


class StreamingPrompts:
    """The prompts of ``--prompt-data``, read as they are needed, in place of a `PromptDataset`.

    Raises `DataError` if a file is missing or not of its format, or a slice cannot be streamed. Rows are not looked at.
    """

    def __init__(self, config: RolloutConfig, encoder: PromptEncoder, *, encoding: RowEncoder | None = None) -> None:
        self._config = config
        self._encoding = encoding or RowEncoder(config, encoder)
        self._files = [PromptFile(path, streamed=True) for path in config.data.prompt_paths]
        self._digest = encoder.digest

    def feed(self, *, shuffle: bool, seed: int) -> StreamFeed:
        """Prompts from the beginning on, each epoch shuffled in blocks of ``--streaming-shuffle-buffer`` rows."""
        config, weights = self._config, self._config.data.prompt_data_weights
        block = config.data.shuffle_block if shuffle else 1
        lanes = [
            _Lane(files, self._encoding, block=block, salt=f"{seed}:{place}" if weights else str(seed), config=config)
            for place, files in enumerate([[file] for file in self._files] if weights else [self._files])
        ]
        return StreamFeed(lanes, weights or (1.0,), self._identity(block if shuffle else False, seed))

    def _identity(self, shuffle: int, seed: int) -> dict[str, Any]:
        """All that the order and the samples depend on, apart from what the files' samples do not show."""
        config = self._config
        settings = [
            [str(split_slice(file.path)[1]) for file in self._files],
            config.data.prompt_data_weights,
            [config.data.input_key, config.data.label_key, config.data.metadata_key, config.data.tool_key],
            config.data.rollout_max_prompt_len,
            self._digest,
        ]
        return {
            "bytes": sum(file.size for file in self._files),
            "digest": _hash([file.digest for file in self._files]),
            "settings": _hash(settings),
            "shuffle": shuffle,
            "seed": seed,
        }


def _hash(values: Any) -> str:
    return hashlib.blake2b(orjson.dumps(values), digest_size=16).hexdigest()
