"""Chat messages of a row, checked, in the one form that everything behind reads.

``{"role": …, "content": …}`` stays as it is. ShareGPT's ``{"from": "human", "value": …}`` is written as that, content
in parts that are all text as their text, and a list that is given as its JSON text as the list.
"""

from __future__ import annotations

from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Message, Prompt

TURN_MASK_KEY = "step_loss_mask"
"""Field of an assistant message that is 0 where its turn is not to be trained on. Templates do not see it."""

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(where: str, value: Any) -> list[Message]:
    """Check a list of messages, or its JSON text. Errors name the message."""
    value = _parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a list of chat messages, got {kind(value)}")
    return [_message(f"{where}, message {place}", message) for place, message in enumerate(value, 1)]


def text_or_messages(where: str, value: Any) -> Prompt:
    """Check a prompt or a response."""
    if isinstance(value, list) and value and all(_is_part(part) for part in value):
        value = _content(where, value)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return read_messages(where, value)
    raise DataError(f"{where} must be a string or a list of chat messages, got {kind(value)}")


def kind(value: Any) -> str:
    """JSON's word for a value, for messages."""
    if value in ("", []):
        return f"an empty {'list' if isinstance(value, list) else 'string'}"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "…"}}, got {kind(value)}')
    message = dict(value)
    if "role" not in message and "from" in message:
        message |= _of_sharegpt(message.pop("from"), message.pop("value", None))
    # Templates ask whether the content is none; columns cannot tell null from absent.
    message.setdefault("content", None)
    if not (isinstance(message.get("role"), str) and message["role"]):
        raise DataError(f"{where} needs a 'role' (a string such as 'user'); it has {sorted(value)}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise DataError(f"{where}: 'tool_calls' must be a list of objects with a 'function' that has a 'name'")
    message["content"] = _content(where, message["content"])
    if not (isinstance(message["content"], str) or (calls and message["content"] is None)):
        raise DataError(f"{where} needs 'content' as a string, got {kind(message['content'])}")
    if not isinstance(message.get("reasoning_content"), str | None):
        raise DataError(f"{where}: 'reasoning_content' must be a string, got {kind(message['reasoning_content'])}")
    if message.get(TURN_MASK_KEY, 1) not in (0, 1):
        raise DataError(f"{where}: {TURN_MASK_KEY!r} must be 0 or 1, got {message[TURN_MASK_KEY]!r}")
    return message


def _of_sharegpt(role: Any, content: Any) -> Message:
    """ShareGPT's speaker and what he says; a function call is the JSON of one call, or of several."""
    message = {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
    if role == "function_call" and isinstance(content, str):
        calls = _parsed(content)
        calls = calls if isinstance(calls, list) else [calls]
        if calls and all(isinstance(call, dict) and _is_call(call) for call in calls):
            functions = [call.get("function", call) for call in calls]
            message |= {"content": None, "tool_calls": [{"type": "function", "function": one} for one in functions]}
    return message


def _content(where: str, value: Any) -> Any:
    """Content in parts as one text; anything else as it is."""
    if not (isinstance(value, list) and value):
        return value
    for place, part in enumerate(value, 1):
        if not (isinstance(part, str) or _is_part(part)):
            got = f"a part of the type {part['type']!r}" if isinstance(part, dict) and "type" in part else kind(part)
            raise DataError(f"{where}: part {place} of 'content' must be text, got {got}; only text is read")
    return "".join(part if isinstance(part, str) else part["text"] for part in value)


def _is_part(value: Any) -> bool:
    is_text = isinstance(value, dict) and value.get("type", "text") in _TEXT_PARTS
    return is_text and "role" not in value and isinstance(value.get("text"), str)


def _is_call(value: Any) -> bool:
    function = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parsed(text: str) -> Any:
    """The list or object that a text is the JSON of; otherwise the text."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict | list) else text
