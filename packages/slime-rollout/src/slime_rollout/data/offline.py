"""Training data that needs no generation: conversations for supervised fine-tuning, and preference pairs.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": "4", "rejected": "5", "margin": 1.5}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": [{"role": "user", …}, …]}

In chat pairs the prompt may stand in its own field or at the beginning of both conversations, or in both places.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from slime_core.errors import DataError
from slime_core.types import Group, Message, Prompt, Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import as_messages, encode_text, text_tokens
from slime_rollout.data.chat_mask import ChatEncoder, EncodedChat, shared_length
from slime_rollout.data.dataset import Dataset
from slime_rollout.data.files import RawRow
from slime_rollout.data.forms import OWN, conversation, form_of, question_of, system_key, used_by
from slime_rollout.data.messages import kind, read_messages, text_or_messages
from slime_rollout.data.rows import Fields, Row, common_values, find_field, read_rows, row_values
from slime_rollout.limits import ModelLimits

logger = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")

CHOSEN_REWARD, REJECTED_REWARD = 1.0, 0.0
_PROMPT_KEYS = ("prompt", "question", "instruction", "input")
_CHOSEN_KEYS = ("chosen", "chosen_response", "preferred")
_REJECTED_KEYS = ("rejected", "rejected_response", "dispreferred")


@dataclass(frozen=True, kw_only=True)
class SftFields(Fields):
    """Names of fields: of messages, unset ``messages``, then ``conversations``; with ``answer_key`` of a question.

    Rows of other projects are recognised without (:mod:`slime_rollout.data.forms`).
    """

    messages_key: str | None = None
    answer_key: str | None = None

    @classmethod
    def of(cls, config: RolloutConfig) -> SftFields:
        """The fields that the flags name."""
        data = config.data
        names = {"tool_key": data.tool_key, "metadata_key": data.metadata_key}
        return cls(messages_key=data.input_key, answer_key=data.label_key, **names)


@dataclass(frozen=True, kw_only=True)
class SftRow(Row):
    """One conversation of a file, with an assistant's message in it."""

    messages: list[Message]


def read_sft(path: str, fields: SftFields | None = None, *, on_bad_data: str = "error") -> list[SftRow]:
    """Read and check a file of conversations, as `check_prompt_file` does one of prompts."""
    return read_rows(path, functools.partial(sft_row, fields=fields or SftFields()), on_bad_data)


class _EncodedRows(Dataset[ItemT]):
    """Rows and the tokens that ``encoder`` made of them."""

    def __init__(self, rows: Iterable[ItemT], encoder: ChatEncoder | PreferenceEncoder) -> None:
        super().__init__(rows)
        self._tokenizer = encoder.tokenizer

    def _note_left_out(self, path: str, what: str, total: int, cut: int, why: str) -> Self:
        """Say in a line, which is logged, too, what was left out or cut."""
        if cut or len(self) < total:
            notice = f"{path}: of {total} {what} left out {total - len(self)} {why} tokens, and cut {cut}"
            logger.warning("%s", notice)
            self.notices = (notice,)
        return self


class SftDataset(_EncodedRows[tuple[SftRow, EncodedChat]]):
    """Conversations and their tokens, for a `RolloutDataSource`."""

    @classmethod
    def load(
        cls,
        path: str,
        encoder: ChatEncoder,
        *,
        max_length: int | None = None,
        fields: SftFields | None = None,
        on_bad_data: str = "error",
        last_turn_only: bool = False,
        limits: ModelLimits | None = None,
    ) -> SftDataset:
        """Read, check and tokenize a file as :func:`read_sft` does.

        A row is bad, too, if the template refuses it, or a token is outside the vocabulary of ``limits``. With
        ``last_turn_only`` only the assistant's last message is trained on. Conversations longer than ``max_length``
        tokens lose their end. Those without a trained token are left out. Raises `DataError` if the file breaks its
        format, the template cannot be used, or no row is left.
        """
        how: Any = {"fields": fields, "last_turn_only": last_turn_only, "max_length": max_length, "limits": limits}
        rows = read_rows(path, functools.partial(encode_conversation, encoder=encoder, **how), on_bad_data)
        kept = [(row, encoded) for row, encoded in rows if 1 in encoded.loss_mask]
        if not kept:
            raise DataError(f"{path}: none of the {len(rows)} conversations has a trained token within {max_length}")
        cut = sum(encoded.truncated for _, encoded in kept)
        why = f"without a trained token within {max_length}"
        return cls(kept, encoder)._note_left_out(path, "conversations", len(rows), cut, why)

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """Samples of one conversation: ``size`` of them, usually one.

        Their prompt tokens end where the first trained token begins; the loss mask is 0 on what users, tools and
        headers say after that. The reward is 0, which no SFT loss looks at.
        """
        row, encoded = self._items[place]
        return [
            encoded.sample(
                self._tokenizer,
                reward=0.0,
                index=first_index + offset,
                group_index=group_index,
                prompt=copy.deepcopy(row.messages),
                metadata=copy.deepcopy(row.metadata) | ({"tools": copy.deepcopy(row.tools)} if row.tools else {}),
            )
            for offset in range(size)
        ]

    def _hashed(self, item: tuple[SftRow, EncodedChat]) -> Any:
        row, encoded = item
        return [row.metadata, encoded.tokens, encoded.loss_mask]


def encode_conversation(
    raw: RawRow,
    encoder: ChatEncoder,
    *,
    fields: SftFields | None = None,
    last_turn_only: bool = False,
    max_length: int | None = None,
    limits: ModelLimits | None = None,
) -> tuple[SftRow, EncodedChat]:
    """A row of a file of conversations and its tokens, as :meth:`SftDataset.load` has them; a `DataError` if bad."""
    row = sft_row(raw, fields or SftFields())
    try:
        first = last_turn(row.messages) if last_turn_only else 0
        encoded = encoder.encode(row.messages, tools=row.tools, first_trained=first, max_length=max_length)
        _check_tokens(encoded, "the conversation", encoder.tokenizer, limits)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    return row, encoded


def _check_tokens(encoded: EncodedChat, what: str, tokenizer: Any, limits: ModelLimits | None) -> None:
    if limits is not None and (problem := limits.token_problem(encoded.tokens, tokenizer)):
        raise DataError(f"{what}'s {problem}")


def last_turn(messages: Sequence[Message]) -> int:
    """The number of the assistant's last message."""
    return max(place for place, message in enumerate(messages) if message["role"] == "assistant")


def sft_row(raw: RawRow, fields: SftFields) -> SftRow:
    """Check a row of a file of conversations; says where and why it cannot be used."""
    where, values = raw.where, row_values(raw)
    messages, used, said = _conversation(raw, values, fields)
    if (key := system_key(values, messages)) is not None:
        messages = [{"role": "system", "content": values[key]}, *messages]
        used, said = used | {key}, _also(said, key)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{where}: no message is the assistant's, so there is nothing to train on; roles: {roles}")
    if roles[0] == "assistant":
        raise DataError(f"{where}: message 1 is the assistant's; begin with a system or user message")
    return SftRow(messages=messages, said=said, **common_values(where, values, fields, used))


def _conversation(raw: RawRow, values: dict[str, Any], fields: SftFields) -> tuple[list[Message], set[str | None], str]:
    """The messages of a row, the fields that they are of, and how it is read if another project wrote it."""
    where, given = raw.where, fields.messages_key
    if fields.answer_key is None and (form := form_of(values, "conversations", given)) is not None:
        key, question = str(form.answer), question_of(where, values, form)
        return conversation(where, question, values[key], key), used_by(form), form.said
    advice = "name it with --input-key; or what is answered so, and its answer with --label-key"
    key, value = find_field(raw, values, given, OWN["conversations"], "the conversation", advice)
    if fields.answer_key is None:
        return read_messages(f"{where}: {key!r}", value), {key}, ""
    question = text_or_messages(f"{where}: {key!r}", value)
    answer_key, answer = find_field(raw, values, fields.answer_key, (), "the answer", "name it with --label-key")
    said = f"{key} is given, {answer_key} is trained on"
    return conversation(where, question, answer, answer_key), {key, answer_key}, said


def _also(said: str, key: str) -> str:
    return "; ".join([*filter(None, [said]), f"{key} is the system's message"])


@dataclass(frozen=True, kw_only=True)
class PreferenceFields(Fields):
    """Names of fields; unset: the first of the usual names that a row has. The margin is optional in a row."""

    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    margin_key: str = "margin"

    @classmethod
    def of(cls, config: RolloutConfig) -> PreferenceFields:
        """The fields that the flags name."""
        data = config.data
        names = {"tool_key": data.tool_key, "metadata_key": data.metadata_key}
        return cls(prompt_key=data.input_key, chosen_key=data.chosen_key, rejected_key=data.rejected_key, **names)


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(Row):
    """One pair of a file: text throughout, or messages throughout, where responses are those after the prompt."""

    prompt: Prompt
    chosen: Prompt
    rejected: Prompt
    margin: float | None = None  # by how much the chosen one is better, if the row says so


def read_preferences(
    path: str, fields: PreferenceFields | None = None, *, on_bad_data: str = "error"
) -> list[PreferenceRow]:
    """Read and check a file of pairs, as `check_prompt_file` does one of prompts."""
    return read_rows(path, functools.partial(preference_row, fields=fields or PreferenceFields()), on_bad_data)


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch:
    """P pairs: chosen, rejected, chosen, rejected, …; T tokens of their 2P responses, one after the other.

    Attributes:
        samples: 2P samples.
        lengths: Tokens of each response, 2P numbers that add up to T: ``lengths`` of ``slime_core.ops.dpo_pair_loss``.
        loss_mask: T numbers, 1 where a token counts: its ``mask_T``.
        score_positions: Per sample, the place in its ``tokens`` of the last token that counts, where a reward model's
            score is read.
        margins: P numbers, 0 for a pair without one; ``None`` if no pair has one: ``margins_P`` of
            ``slime_core.ops.reward_model_loss``.
    """

    samples: list[Sample]
    lengths: list[int]
    loss_mask: list[int]
    score_positions: list[int]
    margins: list[float] | None


def preference_batch(groups: Sequence[Group]) -> PreferenceBatch:
    """Batch pairs, such as a `RolloutDataSource` over a :class:`PreferenceDataset` gives them."""
    for group in groups:
        rewards = [sample.reward for sample in group]
        if rewards != [CHOSEN_REWARD, REJECTED_REWARD]:
            raise DataError(f"a preference pair is a chosen and a rejected sample, rewards 1 and 0; got {rewards}")
    samples = [sample for group in groups for sample in group]
    given = [group[0].train_metadata.get("margin") for group in groups]
    return PreferenceBatch(
        samples=samples,
        lengths=[sample.response_length for sample in samples],
        loss_mask=[entry for sample in samples for entry in sample.trained_mask],
        score_positions=[len(sample.tokens) - 1 - sample.trained_mask[::-1].index(1) for sample in samples],
        margins=None if all(margin is None for margin in given) else [margin or 0.0 for margin in given],
    )


class PreferenceEncoder:
    """Turns pairs into tokens, with ``chat`` if they are messages.

    In chat pairs the assistant's turns after the prompt are trained on. In text pairs the prompt is tokenized as for
    generation and the response behind it, so both sides of a pair have the same prompt tokens; then comes the
    tokenizer's end token.
    """

    def __init__(self, tokenizer: Any, chat: ChatEncoder | None = None) -> None:
        self.tokenizer = tokenizer
        self._chat = chat

    def encode(self, row: PreferenceRow, *, max_length: int | None = None) -> tuple[EncodedChat, EncodedChat]:
        """The chosen and the rejected side of a pair; a `DataError` if the template cannot be used for it."""
        try:
            chosen, rejected = self._side(row, row.chosen), self._side(row, row.rejected)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None
        return chosen.cut(max_length), rejected.cut(max_length)

    def _side(self, row: PreferenceRow, response: Any) -> EncodedChat:
        if isinstance(row.prompt, str):
            return self._text(row.prompt, response)
        if self._chat is None:
            raise DataError("the pair is chat messages, and there is no chat template; write it as text")
        return self._chat.encode([*row.prompt, *response], tools=row.tools, first_trained=len(row.prompt))

    def _text(self, prompt: str, response: str) -> EncodedChat:
        before = text_tokens(self.tokenizer, prompt)
        end = self.tokenizer.eos_token_id
        if before and before[-1] == end:
            before.pop()
        after = encode_text(self.tokenizer, response)
        if end is not None and after[-1:] != [end]:
            after.append(end)
        return EncodedChat(tokens=before + after, loss_mask=[0] * len(before) + [1] * len(after))


class PreferenceDataset(_EncodedRows[tuple[PreferenceRow, EncodedChat, EncodedChat]]):
    """Pairs with their tokens, for a `RolloutDataSource` with ``samples_per_prompt=2``."""

    def __init__(
        self, pairs: Iterable[tuple[PreferenceRow, EncodedChat, EncodedChat]], encoder: PreferenceEncoder
    ) -> None:
        super().__init__(pairs, encoder)

    @classmethod
    def load(
        cls,
        path: str,
        encoder: PreferenceEncoder,
        *,
        max_length: int | None = None,
        fields: PreferenceFields | None = None,
        on_bad_data: str = "error",
        limits: ModelLimits | None = None,
    ) -> PreferenceDataset:
        """Read, check and tokenize a file as :func:`read_preferences` does.

        A pair is bad, too, if the template refuses it, or a token is outside the vocabulary of ``limits``. A side
        longer than ``max_length`` tokens loses its end. Pairs are left out if then a side has no response, or both
        sides are the same. Raises `DataError` if the file breaks its format, the template cannot be used, or no pair
        is left.
        """
        encode = functools.partial(encode_pair, encoder=encoder, fields=fields, max_length=max_length, limits=limits)
        pairs = read_rows(path, encode, on_bad_data)
        kept = [pair for pair in pairs if _differs(*pair[1:])]
        if not kept:
            raise DataError(f"{path}: none of the {len(pairs)} pairs differs within {max_length} tokens")
        cut = sum(chosen.truncated or rejected.truncated for _, chosen, rejected in kept)
        why = f"with an empty response, or two that do not differ, within {max_length}"
        return cls(kept, encoder)._note_left_out(path, "pairs", len(pairs), cut, why)

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """The chosen (reward 1) and the rejected sample (reward 0) of one pair; ``size`` must be 2."""
        if size != 2:
            raise DataError(f"a preference pair has 2 samples, not {size}; set samples_per_prompt to 2")
        row, *sides = self._items[place]
        return [
            side.sample(
                self._tokenizer,
                index=first_index + offset,
                group_index=group_index,
                prompt=copy.deepcopy(row.prompt),
                reward=(CHOSEN_REWARD, REJECTED_REWARD)[offset],
                metadata=copy.deepcopy(row.metadata),
                train_metadata={} if row.margin is None else {"margin": row.margin},
            )
            for offset, side in enumerate(sides)
        ]

    def _hashed(self, item: tuple[PreferenceRow, EncodedChat, EncodedChat]) -> Any:
        row, *sides = item
        return [row.metadata, row.margin, [[side.tokens, side.loss_mask] for side in sides]]


def encode_pair(
    raw: RawRow,
    encoder: PreferenceEncoder,
    *,
    fields: PreferenceFields | None = None,
    max_length: int | None = None,
    limits: ModelLimits | None = None,
) -> tuple[PreferenceRow, EncodedChat, EncodedChat]:
    """A row of a file of pairs and its two sides, as :meth:`PreferenceDataset.load` has them; `DataError` if bad."""
    row = preference_row(raw, fields or PreferenceFields())
    sides = encoder.encode(row, max_length=max_length)
    try:
        for what, side in zip(("the chosen side", "the rejected side"), sides, strict=True):
            _check_tokens(side, what, encoder.tokenizer, limits)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
    return row, *sides


def preference_row(raw: RawRow, fields: PreferenceFields) -> PreferenceRow:
    """Check a row of a file of pairs; says where and why it cannot be used."""
    where, values = raw.where, row_values(raw)

    def found(given: str | None, usual: tuple[str, ...], what: str, flag: str) -> tuple[str, Prompt]:
        key, value = find_field(raw, values, given, usual, what, f"name it with {flag}")
        # Some data sets write a response as one message.
        return key, text_or_messages(f"{where}: {key!r}", [value] if isinstance(value, dict) else value)

    chosen_key, chosen = found(fields.chosen_key, _CHOSEN_KEYS, "the chosen response", "--chosen-key")
    rejected_key, rejected = found(fields.rejected_key, _REJECTED_KEYS, "the rejected response", "--rejected-key")
    if chosen == rejected:
        raise DataError(f"{where}: {chosen_key!r} and {rejected_key!r} are the same, so nothing is preferred")
    used: set[str | None] = {chosen_key, rejected_key, fields.margin_key}
    prompt, said = None, ""
    if fields.prompt_key is None and (form := form_of(values, "pairs")) is not None:
        prompt, said, used = question_of(where, values, form), form.said, used | used_by(form)
    elif fields.prompt_key or any(values.get(key) is not None for key in _PROMPT_KEYS):
        prompt_key, prompt = found(fields.prompt_key, _PROMPT_KEYS, "the prompt", "--input-key")
        used.add(prompt_key)
    elif isinstance(chosen, str) and isinstance(rejected, str):
        if not (shared := _shared_words(chosen, rejected)):
            found(None, _PROMPT_KEYS, "the prompt", "--input-key")
        prompt, said = shared, "the prompt is what chosen and rejected begin with"
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    prompt, chosen, rejected = _split(where, prompt, chosen, rejected)
    if (key := system_key(values, as_messages(prompt))) is not None:
        prompt, said = [{"role": "system", "content": values[key]}, *as_messages(prompt)], _also(said, key)
        chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
        used.add(key)
    return PreferenceRow(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        margin=_margin(f"{where}: {fields.margin_key!r}", values.get(fields.margin_key)),
        said=said,
        **common_values(where, values, fields, used),
    )


def _shared_words(chosen: str, rejected: str) -> str:
    """The common beginning of two texts, up to the space, or behind the line break, before words that differ."""
    shared = chosen[: shared_length(chosen[:-1], rejected[:-1])]
    return shared[: max(shared.rfind(" "), shared.rfind("\n") + 1, 0)]


def _split(where: str, prompt: Prompt | None, chosen: Prompt, rejected: Prompt) -> tuple[Prompt, Prompt, Prompt]:
    """Bring a pair to one form: text throughout, or messages, the prompt's apart."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: one response is text and the other chat messages; write both the same way")
    if isinstance(prompt, str) and isinstance(chosen, str):
        return prompt, chosen, rejected
    answers = [as_messages(chosen, "assistant"), as_messages(rejected, "assistant")]
    shared = answers[0][: shared_length(answers[0][:-1], answers[1][:-1])]
    given = shared if prompt is None else as_messages(prompt)
    if prompt is None or all(answer[: len(given)] == given for answer in answers):
        answers = [answer[len(given) :] for answer in answers]
    if not given or given[0]["role"] == "assistant":
        raise DataError(f"{where}: the pair has no prompt: it must begin with the same system or user messages")
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer or answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            roles = [message["role"] for message in answer]
            raise DataError(
                f"{where}: after the prompt, the {name} response must begin and end with the assistant's message, "
                f"got the roles {roles}"
            )
    return given, answers[0], answers[1]


def _margin(where: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} must be a number, got {kind(value)}")
    return float(value)


def _differs(chosen: EncodedChat, rejected: EncodedChat) -> bool:
    return 1 in chosen.loss_mask and 1 in rejected.loss_mask and chosen.tokens != rejected.tokens
