"""Preference pairs: one prompt and two responses, of which people or a judge preferred the first.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": "4", "rejected": "5", "margin": 1.5}
    {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": [{"role": "user", …}, …]}

In chat pairs the prompt may stand in its own field or at the beginning of both conversations, or in both places.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Message, Prompt
from slime_rollout.data.conversations import ChatFields, ChatRow, chat_row, field_name, read_rows
from slime_rollout.data.fields import described, read_messages
from slime_rollout.data.plain import kind

_PROMPT_KEYS = ("prompt", "question", "instruction", "input")
_CHOSEN_KEYS = ("chosen", "chosen_response", "preferred")
_REJECTED_KEYS = ("rejected", "rejected_response", "dispreferred")


@dataclass(frozen=True, kw_only=True)
class PreferenceFields(ChatFields):
    """Which fields of a row hold what, besides those of `ChatFields`; ``None`` stands for the usual names.

    Attributes:
        prompt_key: Field of the prompt; without it ``prompt``, ``question``, ``instruction``, then ``input``.
        chosen_key: Field of the better response; without it ``chosen``, ``chosen_response``, then ``preferred``.
        rejected_key: Field of the other; without it ``rejected``, ``rejected_response``, then ``dispreferred``.
        margin_key: Field of a number, how much better it is; optional in a row.
    """

    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    margin_key: str = "margin"


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(ChatRow):
    """One pair of a file, with what any `ChatRow` has: text throughout, or messages throughout.

    Attributes:
        prompt: What both respond to.
        chosen: The better response; as messages, those after the prompt.
        rejected: The other.
        margin: By how much the chosen one is better, if the row says so.
    """

    prompt: Prompt
    chosen: Prompt
    rejected: Prompt
    margin: float | None = None


def read_preferences(
    path: str, fields: PreferenceFields | None = None, *, on_bad_data: str = "error"
) -> list[PreferenceRow]:
    """Read and check a file of pairs, or the slice of it that ``path`` names. It needs no tokenizer.

    Args:
        path: The file.
        fields: The names of the fields.
        on_bad_data: What to do about rows that break the format: ``error``, or ``skip`` and log how many and which.

    Raises:
        DataError: The file is missing or empty, or a line breaks the format; says which and how.
    """
    return read_rows(path, functools.partial(preference_row, fields or PreferenceFields()), on_bad_data)


def preference_row(fields: PreferenceFields, where: str, values: dict[str, Any]) -> PreferenceRow:
    """One row of a file.

    Raises:
        DataError: It breaks the format; says where and how.
    """
    chosen_key = field_name(where, values, fields.chosen_key, _CHOSEN_KEYS, "the chosen response")
    rejected_key = field_name(where, values, fields.rejected_key, _REJECTED_KEYS, "the rejected response")
    chosen = _text_or_messages(f"{where}: {chosen_key!r}", values[chosen_key])
    rejected = _text_or_messages(f"{where}: {rejected_key!r}", values[rejected_key])
    if chosen == rejected:
        raise DataError(f"{where}: {chosen_key!r} and {rejected_key!r} are the same, so nothing is preferred")
    prompt_key = None
    if fields.prompt_key or isinstance(chosen, str) or any(values.get(key) is not None for key in _PROMPT_KEYS):
        prompt_key = field_name(where, values, fields.prompt_key, _PROMPT_KEYS, "the prompt")
    prompt = None if prompt_key is None else _text_or_messages(f"{where}: {prompt_key!r}", values[prompt_key])
    prompt, chosen, rejected = _split(where, prompt, chosen, rejected)
    return PreferenceRow(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        margin=_margin(f"{where}: {fields.margin_key!r}", values.get(fields.margin_key)),
        **chat_row(where, values, fields, {prompt_key, chosen_key, rejected_key, fields.margin_key}),
    )


def _split(where: str, prompt: Prompt | None, chosen: Prompt, rejected: Prompt) -> tuple[Prompt, Prompt, Prompt]:
    """Bring a pair to one form: text throughout, or messages, the prompt's apart."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: one response is text and the other chat messages; write both the same way")
    if isinstance(prompt, str) and isinstance(chosen, str):
        return prompt, chosen, rejected
    answers = [_as_messages(chosen, "assistant"), _as_messages(rejected, "assistant")]
    if prompt is None:
        shared = 0
        while shared < min(map(len, answers)) - 1 and answers[0][shared] == answers[1][shared]:
            shared += 1
        given = answers[0][:shared]
    else:
        given = _as_messages(prompt, "user")
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


def _as_messages(value: Prompt, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _text_or_messages(where: str, value: Any) -> Prompt:
    if isinstance(value, list) and value:
        return read_messages(where, value)
    if isinstance(value, dict):  # one message, as some data sets write a response
        return read_messages(where, [value])
    if not isinstance(value, str) or not value:
        raise DataError(f"{where} must be a string or chat messages, got {described(value)}")
    return value


def _margin(where: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} must be a number, got {kind(value)}")
    return float(value)
