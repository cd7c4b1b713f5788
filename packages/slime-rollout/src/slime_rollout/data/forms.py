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


@dataclass(frozen=True, kw_only=True)
class Form:
    """Which fields of a row are what, in which the other project's page describes it.

    Attributes:
        question: Fields of what the model answers. The first must be there; text of the others stands under it.
        answer: Field of a conversation's last part, which alone is trained on; prompts and pairs have none.
        said: How rows of it are read.
    """

    of: Kind
    question: tuple[str, ...]
    answer: str | None = None
    said: str


_ALPACA = ("instruction", "input")
_JOINED = "Alpaca's: the prompt is instruction, and input on a line of its own"
FORMS = (
    Form(
        of="conversations",
        question=("prompt",),
        answer="completion",
        said="TRL's: prompt is given, completion is trained on",
    ),
    Form(
        of="conversations",
        question=_ALPACA,
        answer="output",
        said="Alpaca's: the user says instruction, and input on a line of its own; output is the assistant's",
    ),
    Form(
        of="conversations",
        question=("prompt",),
        answer="response",
        said="verl's: prompt is given, response is trained on",
    ),
    Form(
        of="conversations",
        question=("input",),
        answer="output",
        said="OpenRLHF's: input is given, output is trained on",
    ),
    Form(of="prompts", question=_ALPACA, said=_JOINED),
    Form(of="pairs", question=_ALPACA, said=_JOINED),
    Form(
        of="pairs",
        question=("conversations",),
        said="ShareGPT's: conversations is the prompt of chosen and rejected",
    ),
    Form(of="pairs", question=("messages",), said="messages is the prompt of chosen and rejected"),
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
    """What the model answers in a row of a form: text, or messages where it has a history."""
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
        messages += _exchange(*exchange)
    return [*messages, {"role": "user", "content": question}]


def used_by(form: Form | None) -> set[str | None]:
    """Fields that a form reads."""
    if form is None:
        return set()
    return {*form.question, form.answer, HISTORY_KEY if form.question == _ALPACA else None} - {None}


def conversation(where: str, question: Prompt, answer: Any, answer_key: str) -> list[Message]:
    """A question and its answer as one conversation, in which only the answer's turns are trained on."""
    given: list[Message] = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
    given = [one | {TURN_MASK_KEY: 0} if one["role"] == "assistant" else one for one in given]
    if isinstance(answer, str) and answer:
        return [*given, {"role": "assistant", "content": answer}]
    return [*given, *read_messages(f"{where}: {answer_key!r}", [answer] if isinstance(answer, dict) else answer)]


def with_system(values: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages behind the row's own text for the system, if there is one and no such message."""
    key = system_key(values)
    if key is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": values[key]}, *messages]


def system_key(values: Mapping[str, Any]) -> str | None:
    """The field with text for the system, if the row has one."""
    return next((name for name in SYSTEM_KEYS if isinstance(values.get(name), str) and values[name]), None)


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _text(where: str, values: Mapping[str, Any], name: str) -> str | None:
    text = values.get(name)
    if not isinstance(text, str | None):
        raise DataError(f"{where}: {name!r} must be a string, got {kind(text)}")
    return text
