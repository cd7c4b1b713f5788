"""Rows to tokenized prompts, in this process or ahead in others, and tokenized prompts to samples."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeVar

from slime_core.errors import DataError
from slime_core.types import Group, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import PromptEncoder, load_tokenizer
from slime_rollout.data.files import RawRow
from slime_rollout.data.group_state import copied_value
from slime_rollout.data.rows import PromptRow, check_row

T = TypeVar("T")

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
"""What becomes of a row: its prompt, or what is wrong with it."""


class RowEncoder:
    """Checks and tokenizes rows, each when it is asked for, or ahead in other processes.

    The processes start with the first rows. They end with :meth:`close`, with the last reference to this object, or
    with this process, however it ends. If one dies, that is a `DataError`, and later rows get new processes. As for
    every use of `multiprocessing`, a script that starts them needs ``if __name__ == "__main__"``.

    Args:
        config: Names of the fields, the chat template's use and the reward rule that labels are for.
        encoder: The tokenizer of ``config``; other processes load their own.
        processes: How many others, 0 for none.
    """

    def __init__(self, config: RolloutConfig, encoder: PromptEncoder, processes: int = 0) -> None:
        self._config, self._encoder, self._processes = config, encoder, processes
        self._executor: ProcessPoolExecutor | None = None

    def outcome(self, raw: RawRow) -> Outcome:
        """What becomes of one row."""
        try:
            row = check_row(raw, self._config)
        except DataError as error:
            return error
        try:
            return TokenizedPrompt(row=row, tokens=self._encoder.encode(row.prompt, row.tools))
        except DataError as error:
            return DataError(f"{row.where}: {error}")

    def outcomes(self, rows: Iterable[tuple[T, RawRow]]) -> Iterator[tuple[T, Outcome]]:
        """What becomes of each row, in their order, each with what came along with it.

        Other processes are given at most two chunks each ahead of the row that is taken.

        Raises:
            DataError: What ``rows`` raises, after the outcomes of all rows before; or a process died.
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
            self._processes,
            mp_context=get_context("spawn"),
            initializer=_begin,
            initargs=(self._config, os.getpid()),
        )


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
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(0)


def _encode(rows: list[RawRow]) -> list[Outcome]:
    """In one of the other processes. The tokenizer is loaded here, so that an error of it is the rows' error."""
    global _encoder
    if _encoder is None:
        assert _config is not None
        _encoder = RowEncoder(_config, PromptEncoder.of(_config, load_tokenizer(_config.data.hf_checkpoint)))
    return [_encoder.outcome(raw) for raw in rows]


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
