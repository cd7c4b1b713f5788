"""Rows as other projects write them, and how they are read: a line of a table for each.

A row that has one of our own fields is read by that. Otherwise it is read by the first form of its kind whose fields it
has. What a run reads so is said once for each file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_core.errors import DataError
from slime_core.types import Message, Prompt
from slime_rollout.data.messages import TURN_MASK_KEY, kind, read_messages, text_or_messages

Kind = Literal["prompts", "conversations", "pairs"]


@dataclass(frozen=True)
class Form:
    """The meaning of a row's fields, as the other project's page describes it."""

    of: Kind
    question: tuple[str, ...]  # fields of what the model answers: one that must be there, and texts that stand under it
    answer: str | None  # field of a conversation's last part, which alone is trained on; prompts and pairs have none
    said: str  # how such rows are read


_ALPACA = ("instruction", "input")
_JOINED = "Alpaca's: the prompt is instruction, and input on a line of its own"
_SAID = "Alpaca's: the user says instruction, and input on a line of its own; output is the assistant's"
FORMS = (
    Form("conversations", ("prompt",), "completion", "TRL's: prompt is given, completion is trained on"),
    Form("conversations", _ALPACA, "output", _SAID),
    Form("conversations", ("prompt",), "response", "verl's: prompt is given, response is trained on"),
    Form("conversations", ("input",), "output", "OpenRLHF's: input is given, output is trained on"),
    Form("prompts", _ALPACA, None, _JOINED),
    Form("pairs", _ALPACA, None, _JOINED),
    Form("pairs", ("conversations",), None, "ShareGPT's: conversations is the prompt of chosen and rejected"),
    Form("pairs", ("messages",), None, "messages is the prompt of chosen and rejected"),
)
"""The forms that are recognised, in the order in which they are looked for."""

OWN: Mapping[Kind, tuple[str, ...]] = {
    "prompts": ("prompt",),
    "conversations": ("messages", "conversations"),
    "pairs": ("prompt", "question"),
}
"""Fields that make a row one of ours."""

SYSTEM_KEYS = ("system", "system_prompt")
"""Fields of conversations and pairs whose text becomes the first message, unless there is a system message."""
HISTORY_KEY = "history"
"""Field of Alpaca's rows with earlier exchanges: a list of lists of a question and its answer."""


def form_of(values: Mapping[str, Any], of: Kind, question: str | None = None) -> Form | None:
    """The form of a row without a field of ours; with a ``question`` that was named, of a row that is asked by it."""
    if question is None and any(values.get(name) is not None for name in OWN[of]):
        return None
    for form in FORMS:
        needed = (form.question[0],) if form.answer is None else (form.question[0], form.answer)
        fits = question in (None, form.question[0]) and form.of == of
        if fits and all(values.get(name) is not None for name in needed):
            return form
    return None


def question_of(where: str, values: Mapping[str, Any], form: Form) -> Prompt:
    """The question in a row of a form: text, or messages where it has a history."""
    first, *others = form.question
    question = text_or_messages(f"{where}: {first!r}", values[first])
    if not isinstance(question, str):
        return question
    question = "\n".join([question, *(text for name in others if (text := _text(where, values, name)))])
    history = values.get(HISTORY_KEY) if form.question == _ALPACA else None
    if not history:
        return question
    messages: list[Message] = []
    for place, exchange in enumerate(history if isinstance(history, list) else [history], 1):
        if not (isinstance(exchange, list) and len(exchange) == 2 and all(isinstance(text, str) for text in exchange)):
            raise DataError(
                f"{where}: {HISTORY_KEY!r}, part {place} must be a list of a question and its answer, "
                f"got {kind(exchange)}"
            )
        asked, said = exchange
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return [*messages, {"role": "user", "content": question}]


def used_by(form: Form) -> set[str | None]:
    """Fields that a form reads."""
    return {*form.question, form.answer, HISTORY_KEY if form.question == _ALPACA else None} - {None}


def conversation(where: str, question: Prompt, answer: Any, answer_key: str) -> list[Message]:
    """A question and its answer as one conversation, in which only the answer's turns are trained on."""
    given: list[Message] = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    given = [one | {TURN_MASK_KEY: 0} if one["role"] == "assistant" else one for one in given]
    if isinstance(answer, str) and answer:
        return [*given, {"role": "assistant", "content": answer}]
    return [*given, *read_messages(f"{where}: {answer_key!r}", [answer] if isinstance(answer, dict) else answer)]


def system_key(values: Mapping[str, Any], messages: list[Message]) -> str | None:
    """The field with text for the system, if the row has one and its messages have none."""
    if messages[0]["role"] == "system":
        return None
    return next((name for name in SYSTEM_KEYS if isinstance(values.get(name), str) and values[name]), None)


def _text(where: str, values: Mapping[str, Any], name: str) -> str | None:
    text = values.get(name)
    if not isinstance(text, str | None):
        raise DataError(f"{where}: {name!r} must be a string, got {kind(text)}")
    return text
