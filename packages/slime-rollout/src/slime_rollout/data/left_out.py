"""The parts of a conversation that a chat template does not write, found by asking it.

Each text of the messages and tools gets a mark of its own, a character that occurs nowhere, and the conversation is
rendered once: a mark that is missing from the text was in a part that the template leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Message
from slime_rollout.data.chat import Tools, marked, suited, unused_characters

THINKING, EARLIER = "thinking", "thinking of earlier turns"
"""Two of the parts."""
_WORDS, _CALLS, _ARGUMENTS = "words of the assistant", "tool calls", "arguments of tool calls"
WRITTEN = {_WORDS, _CALLS, _ARGUMENTS, THINKING, EARLIER}
"""Parts that the model itself writes."""
_OF_ROLE = {"system": "the system message", "tool": "tool results", "assistant": _WORDS}
_OTHER_ROLE = "messages of users"
# Fields of a message besides its content, as templates and data sets call them.
_OF_FIELD: Mapping[str, str] = {
    "name": "names",
    "reasoning_content": THINKING,
    "reasoning": THINKING,
    "thinking": THINKING,
}
_THOUGHT, _THOUGHT_END = "<think>", "</think>"

Path = tuple[str | int, ...]
Render = Callable[[list[Message], Tools], str]
"""Messages and tools to text. Raises DataError where the template refuses them."""


@dataclass(frozen=True)
class Lost:
    """A part that is not written, and the number of its message from 0; ``None`` for tools."""

    part: str
    message: int | None


def parts_left_out(render: Render, messages: Sequence[Message], tools: Tools) -> list[Lost]:
    """The parts of a conversation that ``render`` does not write; none if it refuses the messages."""
    try:
        clean = suited(list(messages), lambda some: render(some, tools))
        render(clean, tools)
    except DataError:
        return []
    places = list(_places(clean, tools))
    marks = unused_characters(clean, tools)
    changed: Any = {"messages": clean, "tools": tools}
    placed = list(zip(places, marks, strict=False))
    for (_, path, offset), mark in placed:
        changed = marked(changed, path, offset, mark)
    try:
        text = render(changed["messages"], changed["tools"])
    except DataError:  # a template that looks at what is in a text: nothing is known then
        return []
    return [lost for (lost, _, _), mark in placed if mark not in text and json.dumps(mark)[1:-1] not in text]


def rewrites_history(render: Render, messages: Sequence[Message], tools: Tools) -> bool:
    """Whether a turn of the assistant, and what was before it, is written otherwise once more messages follow."""
    try:
        clean = suited(list(messages), lambda some: render(some, tools))
        whole = render(clean, tools)
        ends = [place + 1 for place, message in enumerate(clean[:-1]) if message["role"] == "assistant"]
        return not all(whole.startswith(render(clean[:end], tools)) for end in ends)
    except DataError:
        return False


def _places(messages: Sequence[Message], tools: Tools) -> Iterator[tuple[Lost, Path, int]]:
    """Each part with a place inside its text: a path from ``{"messages": …, "tools": …}``, and an offset there.

    Of two places in one text the later one comes first, so that its mark moves no other.
    """
    for number, tool in enumerate(tools or []):
        function = ("function",) if isinstance(tool.get("function"), dict) else ()
        yield from _place("tools", None, ("tools", number, *function, "name"), tool.get("function", tool).get("name"))
    for number, message in enumerate(messages):
        role, at = message["role"], ("messages", number)
        thinking = THINKING if number == len(messages) - 1 else EARLIER
        content = message.get("content") or ""
        thought, end, words = content.rpartition(_THOUGHT_END) if role == "assistant" else ("", "", content)
        yield from _place(_OF_ROLE.get(role, _OTHER_ROLE), number, (*at, "content"), words, len(thought) + len(end))
        start = len(thought) - len(inside := thought.rpartition(_THOUGHT)[2])
        yield from _place(thinking, number, (*at, "content"), inside, start)
        for name, part in _OF_FIELD.items():
            yield from _place(thinking if part == THINKING else part, number, (*at, name), message.get(name))
        for place, call in enumerate(message.get("tool_calls") or []):
            function = ("function",) if "function" in call else ()
            path, inner = (*at, "tool_calls", place, *function), call.get("function", call)
            yield from _place(_CALLS, number, (*path, "name"), inner["name"])
            for leaf, text in _first_text(inner.get("arguments"), (*path, "arguments")):
                yield from _place(_ARGUMENTS, number, leaf, text)


def _place(part: str, message: int | None, path: Path, text: Any, start: int = 0) -> Iterator[tuple[Lost, Path, int]]:
    if isinstance(text, str) and text.strip():
        yield Lost(part, message), path, start + len(text.rstrip()) // 2  # templates look at how texts begin and end


def _first_text(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """The first text in a value and where it is."""
    if isinstance(value, str):
        yield path, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for found in _first_text(inner, (*path, key)):
            yield found
            return
