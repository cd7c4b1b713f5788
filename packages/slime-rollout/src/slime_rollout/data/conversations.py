"""Rows of chat data: objects that hold messages, and the checks that all such rows share.

Messages are ``{"role": …, "content": …}``; ShareGPT's ``{"from": "human", "value": …}`` is read as the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Message
from slime_rollout.data.chat_mask import TURN_MASK_KEY
from slime_rollout.data.read import raw_rows
from slime_rollout.data.rows import row_values

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def read_objects(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of any format, or of the slice that ``path`` names, each with file and row.

    Raises:
        DataError: The file is missing, empty or damaged, or a row is no object; says which and how.
    """
    for raw in raw_rows(path):
        yield raw.where, row_values(raw)


def field_name(where: str, values: dict[str, Any], given: str | None, usual: tuple[str, ...], what: str) -> str:
    """Which field of a row holds ``what``: the one that was given, or the first of the usual ones that is there.

    Raises:
        DataError: There is none.
    """
    wanted = usual if given is None else (given,)
    for name in wanted:
        if values.get(name) is not None:
            return name
    names = " or ".join(map(repr, wanted))
    raise DataError(f"{where}: no field {names} for {what}; the row has {sorted(values)}; name the field")


def read_messages(where: str, value: Any) -> list[Message]:
    """Check a list of messages, and write ShareGPT's as the others.

    Raises:
        DataError: It is none; names the message.
    """
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else kind(value)
        raise DataError(f"{where} must be a list of chat messages, got {got}")
    return [_message(f"{where}, message {place}", message) for place, message in enumerate(value, 1)]


def read_tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """Descriptions of tools: a list of objects, or the same as JSON text; ``None`` or an empty list for no tools.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(value or "null")
        except orjson.JSONDecodeError as error:
            raise DataError(f"{where} is text that is no valid JSON: {error.msg}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise DataError(f"{where} must be a list of objects, got {kind(value)}")
    return value or None


def read_metadata(where: str, value: Any) -> dict[str, Any]:
    """An object, or nothing.

    Raises:
        DataError: It is something else.
    """
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{where} must be an object, got {kind(value)}")
    return value or {}


def kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "…"}}, got {kind(value)}')
    message = dict(value)
    if "role" not in message and "from" in message:
        role, content = message.pop("from"), message.pop("value", None)
        message = {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
    if not (isinstance(message.get("role"), str) and message["role"]):
        raise DataError(f"{where} needs a 'role' (a string such as 'user'); it has {sorted(value)}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise DataError(f"{where}: 'tool_calls' must be a list of objects with a 'function' that has a 'name'")
    if not (isinstance(message.get("content"), str) or (calls and message.get("content") is None)):
        raise DataError(f"{where} needs 'content' as a string, got {kind(message.get('content'))}")
    if not isinstance(message.get("reasoning_content"), str | None):
        raise DataError(f"{where}: 'reasoning_content' must be a string, got {kind(message['reasoning_content'])}")
    if message.get(TURN_MASK_KEY, 1) not in (0, 1):
        raise DataError(f"{where}: {TURN_MASK_KEY!r} must be 0 or 1, got {message[TURN_MASK_KEY]!r}")
    return message


def _is_call(value: Any) -> bool:
    function = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
