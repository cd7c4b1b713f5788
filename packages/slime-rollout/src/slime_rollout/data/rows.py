"""One row of a prompt file, whatever the file's format: its fields, checked strictly.

    {"prompt": "57 + 26 =", "label": "83", "metadata": {"source": "sums"}}
    {"prompt": [{"role": "user", "content": "57 + 26?"}], "label": 83}

Fields that are neither prompt, label, tools nor metadata are kept beside the metadata's own entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Prompt
from slime_rollout.data.fields import described, read_messages, read_metadata, read_tools
from slime_rollout.data.plain import kind, plain_values

_DEFAULT_INPUT_KEYS = ("prompt", "input")
_DEFAULT_LABEL_KEY = "label"
# Integers beyond 64 bits are read as floats; from here on a float is not every integer's own.
_INEXACT = 2.0**53


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """A row as its file holds it.

    Attributes:
        where: File and line or row, for messages.
        value: A line of JSON, the columns' values, or what is wrong if they cannot even be taken out of the file.
    """

    where: str
    value: bytes | dict[str, Any] | DataError


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One row of a prompt file.

    Attributes:
        where: File and line or row, for messages.
        prompt: Text, or chat messages.
        label: The expected answer as text, if the row has one.
        tools: Descriptions of the tools that the model may call, for the chat template; ``None`` without.
        metadata: The row's further values; the tools again under ``tools``, for generate functions.
    """

    where: str
    prompt: Prompt
    label: str | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RowFields:
    """Which fields of a row hold what; ``None`` stands for the usual names.

    Attributes:
        input_key: Field of the prompt; without it ``prompt``, then ``input``.
        label_key: Field of the answer, then required; without it ``label`` in rows that have it.
        metadata_key: Field of an object with further values, optional in a row.
        tool_key: Field of a list of tools, optional in a row.
    """

    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"


def make_row(raw: RawRow, fields: RowFields) -> PromptRow:
    """Check a row and take it apart.

    Raises:
        DataError: It breaks the format; says where and how.
    """
    where, values = raw.where, row_values(raw)
    input_key = _input_key(where, values, fields.input_key)
    label_key = fields.label_key or _DEFAULT_LABEL_KEY
    if fields.label_key is not None and values.get(label_key) is None:
        raise DataError(f"{where}: no field {label_key!r}, which --label-key names; the row has {sorted(values)}")
    known = (input_key, label_key, fields.metadata_key, fields.tool_key)
    metadata = {key: value for key, value in values.items() if key not in known}
    metadata |= read_metadata(f"{where}: {fields.metadata_key!r}", values.get(fields.metadata_key))
    tools = read_tools(f"{where}: {fields.tool_key!r}", values.get(fields.tool_key))
    return PromptRow(
        where=where,
        prompt=_prompt(f"{where}: {input_key!r}", values[input_key]),
        label=_label(f"{where}: {label_key!r}", values.get(label_key)),
        tools=tools,
        metadata=metadata if tools is None else metadata | {"tools": tools},
    )


def row_values(raw: RawRow) -> dict[str, Any]:
    """The fields of a row. Of a JSON key that comes twice, the last value counts, as for every parser.

    Raises:
        DataError: It is no JSON object; says where and how.
    """
    if isinstance(raw.value, DataError):
        raise raw.value
    if isinstance(raw.value, dict):
        return plain_values(raw.where, raw.value)
    try:
        values = orjson.loads(raw.value)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{raw.where}: no valid JSON: {error.msg} (column {error.colno}); write one object per line"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{raw.where}: a row must be a JSON object, got {kind(values)}")
    return values


def _input_key(where: str, values: dict[str, Any], given: str | None) -> str:
    wanted = (given,) if given is not None else _DEFAULT_INPUT_KEYS
    there = [key for key in wanted if key in values]
    if there:  # columns cannot tell null from absent
        return next((key for key in there if values[key] is not None), there[0])
    names = " or ".join(repr(key) for key in wanted)
    raise DataError(f"{where}: no field {names} for the prompt; the row has {sorted(values)}; name it with --input-key")


def _prompt(where: str, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return read_messages(where, value)
    raise DataError(f"{where} must be a string or a list of chat messages, got {described(value)}")


def _label(where: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) >= _INEXACT:
        raise DataError(f"{where} is a number of too many digits to be read exactly; write it as a string")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{where} must be a string or a number, got {kind(value)}")
