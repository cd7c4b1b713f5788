"""What rows of prompts, conversations and preference pairs share: messages, tools and metadata, checked strictly.

Messages are ``{"role": …, "content": …}``; ShareGPT's ``{"from": "human", "value": …}`` is read as the same.
"""

from __future__ import annotations

from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Message
from slime_rollout.data.plain import kind

TURN_MASK_KEY = "step_loss_mask"
"""Field of an assistant message that is 0 where its turn is not to be trained on. Templates do not see it."""

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def read_messages(where: str, value: Any) -> list[Message]:
    """Check a list of messages, and write ShareGPT's as the others.

    Raises:
        DataError: It is none; names the message.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a list of chat messages, got {described(value)}")
    return [_message(f"{where}, message {place}", message) for place, message in enumerate(value, 1)]


def read_tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """Descriptions of tools: a list of objects, or its JSON as text; ``None`` where there are none.

    Columns need the text, because they cannot hold schemas that differ.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(value or "null")
        except orjson.JSONDecodeError as error:
            raise DataError(f"{where} is a string, but not the JSON of a list of tools: {error.msg}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise DataError(f"{where} must be a list of objects that describe tools, got {kind(value)}")
    return value or None


def read_metadata(where: str, value: Any) -> dict[str, Any]:
    """An object, or nothing.

    Raises:
        DataError: It is something else.
    """
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{where} must be an object, got {kind(value)}")
    return value or {}


def described(value: Any) -> str:
    """What a value that cannot be used is: as `kind`, and whether it is empty."""
    return f"an empty {'list' if isinstance(value, list) else 'string'}" if value in ("", []) else kind(value)


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "…"}}, got {kind(value)}')
    message = dict(value)
    if "role" not in message and "from" in message:
        role, content = message.pop("from"), message.pop("value", None)
        message |= {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
    # Templates ask whether the content is none; columns cannot tell null from absent.
    message.setdefault("content", None)
    if not (isinstance(message.get("role"), str) and message["role"]):
        raise DataError(f"{where} needs a 'role' (a string such as 'user'); it has {sorted(value)}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise DataError(f"{where}: 'tool_calls' must be a list of objects with a 'function' that has a 'name'")
    if not (isinstance(message["content"], str) or (calls and message["content"] is None)):
        raise DataError(f"{where} needs 'content' as a string, got {kind(message['content'])}")
    if not isinstance(message.get("reasoning_content"), str | None):
        raise DataError(f"{where}: 'reasoning_content' must be a string, got {kind(message['reasoning_content'])}")
    if message.get(TURN_MASK_KEY, 1) not in (0, 1):
        raise DataError(f"{where}: {TURN_MASK_KEY!r} must be 0 or 1, got {message[TURN_MASK_KEY]!r}")
    return message


def _is_call(value: Any) -> bool:
    function = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
