"""Rows to tokenized prompts, and tokenized prompts to samples: the same for data in memory and for streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from slime_core.errors import DataError
from slime_core.types import Group, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.data.check import check_row
from slime_rollout.data.group_state import copied_value
from slime_rollout.data.rows import PromptRow, RawRow
from slime_rollout.data.tokenizer import PromptEncoder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A row of the file and the token ids of its prompt."""

    row: PromptRow
    tokens: list[int]


Outcome = TokenizedPrompt | DataError
"""What becomes of a row: its prompt, or what is wrong with it."""


class Encoding(Protocol):
    """Turns rows into prompts, in this process or in others."""

    def outcomes(self, rows: Iterable[tuple[T, RawRow]]) -> Iterator[tuple[T, Outcome]]:
        """What becomes of each row, in their order, each with what came along with it.

        Raises:
            DataError: What ``rows`` raises, after the outcomes of all rows before; or a process of the encoding ended.
        """


class RowEncoder:
    """Checks and tokenizes rows in this process, each when it is asked for.

    Args:
        config: Names of the fields, the chat template's use and the reward rule that labels are for.
        encoder: The tokenizer.
    """

    def __init__(self, config: RolloutConfig, encoder: PromptEncoder) -> None:
        self._config, self._encoder = config, encoder

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
        """As for `Encoding`."""
        for along, raw in rows:
            yield along, self.outcome(raw)


def fresh_group(prompt: TokenizedPrompt, *, group_index: int, first_index: int, size: int) -> Group:
    """Fresh samples of one prompt, which share nothing.

    Args:
        prompt: The prompt.
        group_index: Number of the group.
        first_index: Number of its first sample; the others count on from there.
        size: Number of samples.
    """
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
