"""Prompt files: JSON Lines, one object per line, read strictly.

    {"prompt": "57 + 26 =", "label": "83", "metadata": {"source": "sums"}}
    {"prompt": [{"role": "user", "content": "57 + 26?"}], "label": 83}

A path may end in ``@[a:b]``, which takes the rows from a to b as a Python slice does. Fields that are neither prompt,
label nor metadata are kept beside the metadata's own entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Message, Prompt

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>|-?\d+):(?P<stop>|-?\d+)\]")
_DEFAULT_INPUT_KEYS = ("prompt", "input")
_DEFAULT_LABEL_KEY = "label"
# Integers beyond 64 bits are read as floats; from here on a float is not every integer's own.
_INEXACT = 2.0**53


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One row of a prompt file.

    Attributes:
        where: File and line, for messages.
        prompt: Text, or chat messages.
        label: The expected answer as text, if the row has one.
        metadata: The row's further values.
    """

    where: str
    prompt: Prompt
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RowFields:
    """Which fields of a row hold what; ``None`` stands for the usual names.

    Attributes:
        input_key: Field of the prompt; without it ``prompt``, then ``input``.
        label_key: Field of the answer, then required; without it ``label`` in rows that have it.
        metadata_key: Field of an object with further values, optional in a row.
    """

    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str = "metadata"


def read_prompts(path: str, fields: RowFields | None = None) -> list[PromptRow]:
    """Read a prompt file, or the slice of it that ``path`` names.

    Args:
        path: Path of the file, with ``@[a:b]`` behind it for some rows only.
        fields: The names of the fields.

    Returns:
        The rows in the file's order, at least one.

    Raises:
        DataError: The file is missing or empty, or a line breaks the format; says which and how.
    """
    file, rows = split_slice(path)
    numbered = list(_lines(Path(file)))
    if not numbered:
        raise DataError(f'{file} is empty; write one JSON object per line, such as {{"prompt": "2 + 2 ="}}')
    chosen = numbered[rows]
    if not chosen:
        raise DataError(f"{path} leaves no row: the file has {len(numbered)}; give a slice that holds some of them")
    return [_row(f"{file}:{number}", line, fields or RowFields()) for number, line in chosen]


def split_slice(path: str) -> tuple[str, slice]:
    """Take ``file@[a:b]`` apart; a path without a slice stands for all rows."""
    match = _SLICE.fullmatch(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if stripped := line.strip():
                    yield number, stripped
    except FileNotFoundError:
        raise DataError(f"the prompt file {file} does not exist; give the path of a JSONL file") from None
    except OSError as error:
        raise DataError(
            f"the prompt file {file} cannot be read: {error.strerror}; give a readable JSONL file"
        ) from None


def _row(where: str, line: bytes, fields: RowFields) -> PromptRow:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{where}: no valid JSON: {error.msg} (column {error.colno}); write one object per line"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: a row must be a JSON object, got {_kind(values)}")
    input_key = _input_key(where, values, fields.input_key)
    label_key = fields.label_key or _DEFAULT_LABEL_KEY
    if fields.label_key is not None and values.get(label_key) is None:
        raise DataError(f"{where}: no field {label_key!r}, which --label-key names; the row has {sorted(values)}")
    own = {key: value for key, value in values.items() if key not in (input_key, label_key, fields.metadata_key)}
    return PromptRow(
        where=where,
        prompt=_prompt(f"{where}: {input_key!r}", values[input_key]),
        label=_label(f"{where}: {label_key!r}", values.get(label_key)),
        metadata=own | _metadata(f"{where}: {fields.metadata_key!r}", values.get(fields.metadata_key)),
    )


def _input_key(where: str, values: dict[str, Any], given: str | None) -> str:
    wanted = (given,) if given is not None else _DEFAULT_INPUT_KEYS
    for key in wanted:
        if key in values:
            return key
    names = " or ".join(repr(key) for key in wanted)
    raise DataError(f"{where}: no field {names} for the prompt; the row has {sorted(values)}; name it with --input-key")


def _prompt(where: str, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return [_message(f"{where}, message {place}", message) for place, message in enumerate(value, 1)]
    got = f"an empty {'list' if isinstance(value, list) else 'string'}" if value in ("", []) else _kind(value)
    raise DataError(f"{where} must be a string or a list of chat messages, got {got}")


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "…"}}, got {_kind(value)}')
    if not (isinstance(value.get("role"), str) and value["role"]):
        raise DataError(f"{where} needs a 'role' (a string such as 'user'); it has {sorted(value)}")
    if not (isinstance(value.get("content"), str) or value.get("tool_calls")):
        raise DataError(f"{where} needs 'content' as a string, got {_kind(value.get('content'))}")
    return value


def _label(where: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) >= _INEXACT:
        raise DataError(f"{where} is a number of too many digits to be read exactly; write it as a string")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{where} must be a string or a number, got {_kind(value)}")


def _metadata(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{where} must be an object, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
