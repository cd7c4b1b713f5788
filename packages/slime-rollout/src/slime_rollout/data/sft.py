"""Supervised fine-tuning: conversations to samples whose loss mask covers what the assistant says.

{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Group, Message, Sample
from slime_rollout.data.chat_mask import ChatEncoder, EncodedChat
from slime_rollout.data.dataset import Dataset
from slime_rollout.data.files import RawRow
from slime_rollout.data.rows import Fields, Row, common_values, field_name, read_messages, read_rows, row_values

logger = logging.getLogger(__name__)

_MESSAGE_KEYS = ("messages", "conversations")


@dataclass(frozen=True, kw_only=True)
class SftFields(Fields):
    """Which fields of a row hold what, besides those of `Fields`.

    Attributes:
        messages_key: Field of the messages; unset: ``messages``, then ``conversations``.
    """

    messages_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class SftRow(Row):
    """One conversation of a file, with what any `Row` has.

    Attributes:
        messages: The conversation, with an assistant's message in it.
    """

    messages: list[Message]


def read_sft(path: str, fields: SftFields | None = None, *, on_bad_data: str = "error") -> list[SftRow]:
    """Read and check a file of conversations, or the slice of it that ``path`` names. It needs no tokenizer.

    Args:
        path: The file.
        fields: The names of the fields.
        on_bad_data: For rows that break the format: ``error``, or ``skip`` and log how many and which.

    Raises:
        DataError: The file is missing or empty, or a line breaks the format; says which and how.
    """
    return read_rows(path, functools.partial(_row, fields=fields or SftFields()), on_bad_data)


def sft_sample(row: SftRow, encoder: ChatEncoder, *, index: int, max_length: int | None = None) -> Sample:
    """A conversation as a sample to train on.

    Its prompt tokens end where the first trained token begins; its loss mask is 0 on what users, tools and headers
    say after that. The reward is 0, which no SFT loss looks at.

    Args:
        row: The conversation.
        encoder: Makes the tokens.
        index: Number of the sample, and of its group.
        max_length: Most tokens; what is longer loses its end and is marked ``truncated``.

    Raises:
        DataError: The template cannot be used for it, or no trained token is left.
    """
    encoded = _encode(row, encoder, max_length)
    if 1 not in encoded.loss_mask:
        cut = f" among the first {max_length} tokens" if encoded.truncated else ""
        raise DataError(f"{row.where}: there is nothing to train on{cut}; leave the row out")
    return _sample(row, encoder, encoded, index=index, group_index=index)


class SftDataset(Dataset[tuple[SftRow, EncodedChat]]):
    """Conversations, tokenized. A `RolloutDataSource` takes it as it takes prompts: order, epochs, exact state.

    Args:
        rows: The conversations and their tokens, at least one.
        encoder: What made the tokens.
    """

    def __init__(self, rows: Iterable[tuple[SftRow, EncodedChat]], encoder: ChatEncoder) -> None:
        super().__init__(rows)
        self._encoder = encoder

    @classmethod
    def load(
        cls,
        path: str,
        encoder: ChatEncoder,
        *,
        max_length: int | None = None,
        fields: SftFields | None = None,
        on_bad_data: str = "error",
    ) -> SftDataset:
        """Read, check and tokenize a file. Rows with no trained token among the first ``max_length`` are left out.

        Args:
            path: The file, perhaps with a slice.
            encoder: Makes the tokens.
            max_length: Most tokens of a conversation; what is longer loses its end.
            fields: The names of the fields.
            on_bad_data: As for :func:`read_sft`; a row that the template refuses is bad, too.

        Raises:
            DataError: The file breaks its format, the template cannot be used, or no row is left.
        """

        def encoded_row(raw: RawRow) -> tuple[SftRow, EncodedChat]:
            row = _row(raw, fields or SftFields())
            return row, _encode(row, encoder, max_length)

        rows = read_rows(path, encoded_row, on_bad_data)
        kept = [(row, encoded) for row, encoded in rows if 1 in encoded.loss_mask]
        if not kept:
            raise DataError(f"{path}: none of the {len(rows)} conversations has a trained token within {max_length}")
        cut = sum(encoded.truncated for _, encoded in kept)
        if cut or len(kept) < len(rows):
            logger.warning(
                "%s: of %d conversations left out %d without a trained token within %s tokens, and cut %d",
                *(path, len(rows), len(rows) - len(kept), max_length, cut),
            )
        return cls(kept, encoder)

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """Samples of one conversation: ``size`` of them, usually one."""
        row, encoded = self._items[place]
        return [
            _sample(row, self._encoder, encoded, index=first_index + offset, group_index=group_index)
            for offset in range(size)
        ]

    def _hashed(self, item: tuple[SftRow, EncodedChat]) -> Any:
        row, encoded = item
        return [row.metadata, encoded.tokens, encoded.loss_mask]


def _encode(row: SftRow, encoder: ChatEncoder, max_length: int | None) -> EncodedChat:
    try:
        return encoder.encode(row.messages, tools=row.tools, max_length=max_length)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None


def _sample(row: SftRow, encoder: ChatEncoder, encoded: EncodedChat, *, index: int, group_index: int) -> Sample:
    return encoded.sample(
        response=encoder.response(encoded),
        reward=0.0,
        index=index,
        group_index=group_index,
        prompt=copy.deepcopy(row.messages),
        metadata=copy.deepcopy(row.metadata) | ({"tools": copy.deepcopy(row.tools)} if row.tools else {}),
    )


def _row(raw: RawRow, fields: SftFields) -> SftRow:
    where, values = raw.where, row_values(raw)
    key = field_name(where, values, fields.messages_key, _MESSAGE_KEYS, "the conversation", "name the field")
    messages = read_messages(f"{where}: {key!r}", values[key])
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{where}: no message is the assistant's, so there is nothing to train on; roles: {roles}")
    if roles[0] == "assistant":
        raise DataError(f"{where}: message 1 is the assistant's; begin with a system or user message")
    return SftRow(messages=messages, **common_values(where, values, fields, {key}))
