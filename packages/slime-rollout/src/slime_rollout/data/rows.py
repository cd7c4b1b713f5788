"""Rows of prompt files, checked strictly, and what rows of conversations and preference pairs share with them.

    {"prompt": "57 + 26 =", "label": "83", "metadata": {"source": "sums"}}
    {"prompt": [{"role": "user", "content": "57 + 26?"}], "label": 83}

Messages are ``{"role": …, "content": …}``; ShareGPT's ``{"from": "human", "value": …}`` is read as the same. Fields
that are neither prompt, label, tools nor metadata are added to the metadata. All prompt files are
checked before a run: without a tokenizer, in a second for usual files.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import logging
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import orjson

from slime_core.errors import DataError
from slime_core.types import Message, Prompt
from slime_rollout.config import DataConfig, RolloutConfig
from slime_rollout.data.files import PromptFile, RawRow
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.rewards.rules import check_scoring

logger = logging.getLogger(__name__)
T = TypeVar("T")

TURN_MASK_KEY = "step_loss_mask"
"""Field of an assistant message that is 0 where its turn is not to be trained on. Templates do not see it."""

_INPUT_KEYS, _LABEL_KEY = ("prompt", "input"), "label"
# Integers beyond 64 bits are read as floats, and from here on several integers are the same float.
_INEXACT = 2.0**53
_FIRST_ROWS = 100  # of a stream, that are checked before a run
_SHOWN = 3  # bad rows that are named in a message
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of the fields that any row may have: tools or their JSON text, and an object with further values."""

    tool_key: str = "tools"
    metadata_key: str = "metadata"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What any row has: its place for messages, tools for the chat template, and further values."""

    where: str
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """One row of a prompt file: a prompt and perhaps the expected answer. Its tools are in the metadata, too."""

    prompt: Prompt
    label: str | None = None


def check_row(raw: RawRow, config: RolloutConfig) -> PromptRow:
    """Check a row's format and that ``config`` can use it; says where and why not."""
    where, values, fields = raw.where, row_values(raw), config.data
    input_key = field_name(where, values, fields.input_key, _INPUT_KEYS, "the prompt", "name it with --input-key")
    label_key = fields.label_key or _LABEL_KEY
    if fields.label_key is not None and values.get(label_key) is None:
        raise DataError(f"{where}: no field {label_key!r}, which --label-key names; the row has {sorted(values)}")
    common = common_values(where, values, fields, {input_key, label_key})
    if common["tools"] is not None:
        common["metadata"]["tools"] = common["tools"]
    prompt = text_or_messages(f"{where}: {input_key!r}", _as_text(values[input_key]))
    label = _label(f"{where}: {label_key!r}", values.get(label_key), given=fields.label_key is not None)
    if not isinstance(prompt, str) and not config.takes_messages:
        raise DataError(f"{where}: the prompt is chat messages; add --apply-chat-template, or write it as text")
    if problem := check_scoring(config, common["metadata"], label):
        raise DataError(f"{where}: {problem}")
    return PromptRow(prompt=prompt, label=label, **common)


def check_prompt_data(config: RolloutConfig) -> dict[str, int]:
    """Read every prompt file that a run will read, as :func:`check_prompt_file`; of streams, the first rows.

    Returns usable rows per path as given: the training prompts, if they are not streamed, then the held-out sets.
    """
    counts = {}
    for path in config.data.prompt_paths:
        if config.data.streaming_data:
            _check_stream(path, config)
        else:
            counts[path] = len(check_prompt_file(path, config))
    for held_out in read_eval_sets(config):
        with held_out.named():
            counts[held_out.path] = len(check_prompt_file(held_out.path, held_out.config))
    return counts


def check_prompt_file(path: str, config: RolloutConfig) -> list[PromptRow]:
    """The rows of one prompt file as ``config`` will use it; with ``--on-bad-data skip`` the usable ones.

    Raises:
        DataError: The file breaks the format, a label is missing or unusable for the reward rule, or a prompt is
            chat messages without ``--apply-chat-template``.
    """
    return read_rows(path, functools.partial(check_row, config=config), config.data.on_bad_data)


def _check_stream(path: str, config: RolloutConfig) -> None:
    first_error = None
    seen = good = 0
    for _, raw in islice(PromptFile(path, streamed=True).rows(), _FIRST_ROWS):
        seen += 1
        try:
            check_row(raw, config)
            good += 1
        except DataError as error:
            if config.data.on_bad_data == "error":
                raise
            first_error = first_error or error
    if not good:
        raise DataError(f"{first_error} (none of the first {seen} rows of {path} can be used)")


def read_rows(path: str, make: Callable[[RawRow], T], on_bad_data: str) -> list[T]:
    """What ``make`` makes of each row of a file or slice, as :func:`usable`; its `DataError` means a bad row."""

    def attempt(raw: RawRow) -> T | DataError:
        try:
            return make(raw)
        except DataError as error:
            return error

    return usable(path, (attempt(raw) for _, raw in PromptFile(path).rows()), on_bad_data)


def usable(path: str, rows: Iterable[T | DataError], on_bad_data: str) -> list[T]:
    """The rows of a file that can be used; a `DataError` if others are not to be skipped, or none can be used."""
    good: list[T] = []
    reasons: list[str] = []
    bad = 0
    for row in rows:
        if not isinstance(row, DataError):
            good.append(row)
            continue
        bad += 1
        if bad <= _SHOWN:
            reasons.append(str(row))
    total = bad + len(good)
    if bad and on_bad_data == "skip" and good:
        more = f"; and {bad - _SHOWN} more" if bad > _SHOWN else ""
        logger.warning("%s: skipped %d of %d rows: %s%s", path, bad, total, "; ".join(reasons), more)
    elif bad:
        counts = f"({bad} of {total} rows of {path} are bad; fix them, or leave them out with --on-bad-data skip)"
        counts = counts if good else f"(all {total} rows of {path} are bad)"
        raise DataError(reasons[0] if bad == 1 else f"{reasons[0]} {counts}")
    return good


def row_values(raw: RawRow) -> dict[str, Any]:
    """The fields of a row. If a JSON key comes twice, the last value counts, as for every parser."""
    if isinstance(raw.value, DataError):
        raise raw.value
    if isinstance(raw.value, dict):
        return _plain_row(raw.where, raw.value)
    try:
        values = orjson.loads(raw.value)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{raw.where}: invalid JSON: {error.msg} (column {error.colno}); write one object per line"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{raw.where}: a row must be a JSON object, got {kind(values)}")
    return values


def field_name(
    where: str, values: dict[str, Any], given: str | None, usual: tuple[str, ...], what: str, advice: str
) -> str:
    """Which field of a row holds ``what``: the given one, or the first of the usual ones that is there and not null."""
    wanted = usual if given is None else (given,)
    there = [name for name in wanted if name in values]
    if there:  # columns cannot tell null from absent
        return next((name for name in there if values[name] is not None), there[0])
    names = " or ".join(map(repr, wanted))
    raise DataError(f"{where}: no field {names} for {what}; the row has {sorted(values)}; {advice}")


def common_values(
    where: str, values: dict[str, Any], fields: Fields | DataConfig, used: set[str | None]
) -> dict[str, Any]:
    """The fields of `Row`. Values that are not ``used`` otherwise are added to the metadata."""
    known = used | {fields.tool_key, fields.metadata_key}
    metadata = values.get(fields.metadata_key)
    if not isinstance(metadata, dict | None):
        raise DataError(f"{where}: {fields.metadata_key!r} must be an object, got {kind(metadata)}")
    others = {name: value for name, value in values.items() if name not in known}
    tools = _tools(f"{where}: {fields.tool_key!r}", values.get(fields.tool_key))
    return {"where": where, "tools": tools, "metadata": others | (metadata or {})}


def read_messages(where: str, value: Any) -> list[Message]:
    """Check a list of messages, and write ShareGPT's as the others. Errors name the message."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a list of chat messages, got {kind(value)}")
    return [_message(f"{where}, message {place}", message) for place, message in enumerate(value, 1)]


def kind(value: Any) -> str:
    """What JSON calls a value, for messages."""
    if value in ("", []):
        return f"an empty {'list' if isinstance(value, list) else 'string'}"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def text_or_messages(where: str, value: Any) -> Prompt:
    """Check a prompt or a response."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return read_messages(where, value)
    raise DataError(f"{where} must be a string or a list of chat messages, got {kind(value)}")


def _as_text(value: Any) -> Any:
    """A whole number as text, such as the number of a task; anything else as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _label(where: str, value: Any, *, given: bool) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) >= _INEXACT:
        raise DataError(f"{where} is a number of too many digits to be read exactly; write it as a string")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    advice = "; leave --label-key out, and it is in the sample's metadata" if given else ""
    raise DataError(f"{where} must be a string or a number, got {kind(value)}{advice}")


def _tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """A list of objects, or its JSON text: columns need the text, because they cannot hold schemas that differ."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value or "null")
        except orjson.JSONDecodeError as error:
            raise DataError(f"{where} is a string, but not the JSON of a list of tools: {error.msg}") from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise DataError(f"{where} must be a list of objects that describe tools, got {kind(value)}")
    return value or None


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


def _plain_row(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """A table's row as a JSON object, so that a row is the same in every format.

    Columns cannot tell an absent field from null, and give every object the fields of all: what is null, or NaN as
    pandas writes it, is left out. Dates become ISO text; decimals and UUIDs text.
    """
    return {key: _plain(f"{where}: {key!r}", value) for key, value in row.items() if not _is_null(value)}


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(where: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(where, item) for key, item in value.items() if not _is_null(item)}
    if isinstance(value, list | tuple):
        return [None if _is_null(item) else _plain(where, item) for item in value]
    if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    got = str(value) if isinstance(value, float) else f"a value of the type {type(value).__name__}"
    raise DataError(f"{where} holds {got}, which JSON cannot; leave the column out of the data set, or make it text")
