"""Messages in the form that a chat template expects, where templates differ.

| | null content beside tool calls | arguments of a tool call |
|---|---|---|
| DeepSeek | asked for: with empty text the calls are lost | their JSON as text; an object is refused |
| GLM | written as the word ``None`` | an object; text is refused |
| Qwen, Llama | either | an object; text is written as a JSON string in JSON, except by Qwen3 |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Message

Rendering = Callable[[list[Message]], str]
"""A template. Raises DataError where it refuses the messages."""


def suited(messages: list[Message], render: Rendering) -> list[Message]:
    """The messages as the template expects them, unchanged if it takes them as they are.

    Raises:
        DataError: It refuses them in every form.
    """
    if not any(message.get("tool_calls") or message.get("content", "") is None for message in messages):
        return messages
    return _without_none(_with_arguments(messages, render), render)


def _with_arguments(messages: list[Message], render: Rendering) -> list[Message]:
    if _written_well(messages, render):
        return messages
    others = [_changed(messages, _as_object), _changed(messages, _as_text)]
    return next((other for other in others if other != messages and _written_well(other, render)), messages)


def _written_well(messages: list[Message], render: Rendering) -> bool:
    """Whether the template takes them, and writes no arguments as a string in JSON."""
    try:
        text = render(messages)
    except DataError:
        return False
    texts = [function["arguments"] for function in _functions(messages) if isinstance(function.get("arguments"), str)]
    return not any(json.dumps(one, ensure_ascii=plain) in text for one in texts for plain in (True, False))


def _without_none(messages: list[Message], render: Rendering) -> list[Message]:
    nulls = [message.get("content", "") is None for message in messages]
    written = render(messages).count("None")
    empty = [{**message, "content": ""} if null else message for message, null in zip(messages, nulls, strict=True)]
    try:
        return empty if written > render(empty).count("None") else messages
    except DataError:
        return messages


def _functions(messages: list[Message]) -> list[dict[str, Any]]:
    functions = [call.get("function", call) for message in messages for call in _calls(message)]
    return [function for function in functions if isinstance(function, dict)]


def _calls(message: Message) -> list[dict[str, Any]]:
    """Its tool calls; none if it has something else there, which is for the template to refuse."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(call, dict) for call in calls) else []


def _changed(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages with other arguments in their tool calls."""

    def call_of(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": call_of(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    return [
        {**message, "tool_calls": [call_of(call) for call in _calls(message)]} if _calls(message) else message
        for message in messages
    ]


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments
        return value if isinstance(value, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
