"""Where the assistant's turns are in a rendered conversation, found without knowing the template.

A template is a program that turns messages into text; no rule says how. But it can be asked: a mark, a character that
occurs nowhere, is put into a message's text, and the conversation is rendered again. If taking the mark out gives the
same rendering as before, the mark stood exactly where that place of the message is written, and it disturbed nothing;
otherwise another place is tried. From such a place on,

- the rendering of the messages before a turn, with the generation prompt, says what the model is given: the turn
  starts where that ends, or, if the template writes past turns otherwise (DeepSeek-R1 and Qwen3 leave reasoning out),
  where the two part;
- the rendering that stops after the turn says what closes it: the turn ends with the last special token in that
  (``<|im_end|>``, ``<|eot_id|>``, ``<｜end▁of▁sentence｜>``). Where nothing closes a turn (GLM), the special token that
  opens the next message does, as it does when the model generates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Message

Render = Callable[[list[Message], bool], str]
"""Messages, and whether to add the generation prompt, to text. Raises DataError where the template refuses them."""

_Place = tuple[tuple[str | int, ...], int]

_BOUNDARY = re.compile(r"[\s>\]:]")
_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the model writes in one assistant message: characters ``start`` to ``end`` of the rendering.

    Attributes:
        message: Position of the message.
        start: First character after what the model is given.
        end: One past the end-of-turn token.
        closed: Whether an end-of-turn token is part of it.
    """

    message: int
    start: int
    end: int
    closed: bool


class TurnFinder:
    """Finds the assistant's turns of one conversation.

    Args:
        render: The template.
        messages: The conversation.
        special: Matches the tokenizer's special tokens.
    """

    def __init__(self, render: Render, messages: list[Message], special: re.Pattern[str]) -> None:
        self._render, self._messages, self._special = render, messages, special
        self._plain: dict[tuple[int, bool], str] = {}
        self.text = self._rendered(len(messages))
        self._mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in repr(messages) + self.text)
        self._marks: dict[tuple[int, _Place, int, bool], int | None] = {}

    def find(self) -> list[Turn]:
        """The turns, in order.

        Raises:
            DataError: The template refuses the messages, or does not show where a turn starts or ends.
        """
        turns: list[Turn] = []
        for number in (place for place, message in enumerate(self._messages) if message["role"] == "assistant"):
            turn = self._turn(number)
            if not (turns[-1].end if turns else 0) <= turn.start <= turn.end:
                raise self._refusal(number, "the turns overlap")
            turns.append(turn)
        return turns

    def _turn(self, number: int) -> Turn:
        if number == 0:
            raise DataError("message 1 is the assistant's; begin with a system or user message, so that it answers one")
        start = self._start(number)
        end, closed = self._end(number)
        return Turn(message=number, start=start, end=end, closed=closed)

    def _start(self, number: int) -> int:
        prompt, before = self._rendered(number, generate=True), self._rendered(number)
        for earlier in reversed(range(number)):
            for place in _places(self._messages[earlier]):
                here = self._position(earlier, place, len(self._messages))
                there = self._position(earlier, place, number, generate=True)
                if here is None or there is None:
                    continue
                given = prompt[there:]
                shared = _shared_length(given, self.text[here : here + len(given)])
                if shared == len(given):
                    return here + shared
                if not prompt.startswith(before) or shared < len(before) - there:
                    raise self._refusal(number, "what comes before it is written otherwise once the turn is there")
                # A shared beginning that breaks off inside a word or a tag reaches into the turn by chance.
                whole = max((match.end() for match in _BOUNDARY.finditer(given, 0, shared)), default=0)
                start = here + max(whole, len(before) - there)
                return min(start, *self._content_starts(number, start))
        raise self._refusal(number, "no message before it is written as it stands")

    def _content_starts(self, number: int, otherwise: int) -> list[int]:
        """Where texts of the message begin: what the model writes begins there or earlier."""
        found = [
            self._position(number, place, len(self._messages)) for place in _places(self._messages[number], first=True)
        ]
        return [position for position in found if position is not None] or [otherwise]

    def _end(self, number: int) -> tuple[int, bool]:
        until = self._rendered(number + 1)
        anchors = ((near, place) for near in range(number, -1, -1) for place in _places(self._messages[near]))
        for near, place in anchors:
            here = self._position(near, place, len(self._messages))
            there = self._position(near, place, number + 1)
            if here is None or there is None or not self.text.startswith(until[there:], here):
                continue
            closing = list(self._special.finditer(until, there))
            if self._closes(number):
                if not closing:
                    break
                return here + closing[-1].end() - there, True
            end = here + len(until) - there
            following = self._special.match(self.text, end)
            if following is None and end < len(self.text):
                raise self._refusal(number, "no special token ends it, so a model could not learn to stop")
            return (end, False) if following is None else (following.end(), True)
        raise self._refusal(number, "it is written otherwise once more messages follow")

    def _closes(self, number: int) -> bool:
        """Whether the template closes a turn itself: a special token comes after a plain answer."""
        answer = {"role": "assistant", "content": self._mark}
        text = self._render([*self._messages[:number], answer], False)
        if self._mark not in text:
            raise self._refusal(number, "a plain answer in its place is not written")
        return self._special.search(text, text.rindex(self._mark)) is not None

    def _rendered(self, count: int, *, generate: bool = False) -> str:
        key = (count, generate)
        if key not in self._plain:
            self._plain[key] = self._render(self._messages[:count], generate)
        return self._plain[key]

    def _position(self, number: int, place: _Place, count: int, *, generate: bool = False) -> int | None:
        """Where a place of a message is in the rendering of the first ``count`` messages; None if that is not clear."""
        key = (number, place, count, generate)
        if key not in self._marks:
            self._marks[key] = self._mark_position(number, place, count, generate=generate)
        return self._marks[key]

    def _mark_position(self, number: int, place: _Place, count: int, *, generate: bool) -> int | None:
        messages = self._messages[:count]
        messages[number] = _marked(messages[number], *place, self._mark)
        try:
            text = self._render(messages, generate)
        except DataError:
            return None
        position = text.find(self._mark)
        unmarked = text[:position] + text[position + 1 :]
        return position if position >= 0 and unmarked == self._rendered(count, generate=generate) else None

    def _refusal(self, number: int, reason: str) -> DataError:
        return DataError(
            f"the chat template does not show where the assistant's turn in message {number + 1} is: {reason}; "
            "mark the turns in the template with {% generation %} and {% endgeneration %}"
        )


def _places(message: Message, *, first: bool = False) -> Iterator[_Place]:
    """Places in a message's texts to try a mark at, the likeliest first; the earliest of the message if ``first``."""
    calls = message.get("tool_calls") or []
    texts: list[tuple[tuple[str | int, ...], str]] = []
    for number in range(len(calls)) if first else reversed(range(len(calls))):
        path = ("tool_calls", number, *(("function",) if "function" in calls[number] else ()), "name")
        texts.append((path, str(_value(message, path) or "")))
    texts.append((("content",), message.get("content") or ""))
    if message.get("reasoning_content"):
        texts.append((("reasoning_content",), message["reasoning_content"]))
    for path, text in texts:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        after_reasoning = text.rfind("</think>") + len("</think>") if "</think>" in text else start
        inner = [max(end - 1, 0), len(text) // 2, len(text) // 4, 3 * len(text) // 4]
        order = [start, after_reasoning] if first else [end, after_reasoning, *inner, start]
        for offset in dict.fromkeys(order):
            yield path, offset


def _shared_length(first: str, second: str) -> int:
    """Length of the longest common beginning."""
    both = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in both if one != other), min(len(first), len(second)))


def _value(message: Message, path: tuple[str | int, ...]) -> Any:
    value: Any = message
    for step in path:
        value = value[step] if isinstance(step, int) else value.get(step)
    return value


def _marked(value: Any, path: tuple[str | int, ...], offset: int, mark: str) -> Any:
    """A copy, as deep as it must be, with the mark in the text at ``path``."""
    if not path:
        return f"{(value or '')[:offset]}{mark}{(value or '')[offset:]}"
    copy: Any = list(value) if isinstance(value, list) else dict(value)
    inner = copy.get(path[0]) if isinstance(copy, dict) else copy[path[0]]
    copy[path[0]] = _marked(inner, path[1:], offset, mark)
    return copy
