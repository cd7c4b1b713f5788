"""Rows of prompt files, checked strictly, and what rows of conversations and preference pairs share with them.

    {"prompt": "57 + 26 =", "label": "83", "metadata": {"source": "sums"}}
    {"prompt": [{"role": "user", "content": "57 + 26?"}], "label": 83}

A field inside an object is named by both names, such as ``reward_model.ground_truth``. Fields that are neither prompt,
label, tools nor metadata are added to the metadata. All prompt files are checked before a run: without a tokenizer, in
a second for usual files.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import orjson

from slime_core.errors import DataError
from slime_core.types import Prompt
from slime_rollout.config import DataConfig, RolloutConfig
from slime_rollout.data.files import PromptFile, RawRow
from slime_rollout.data.forms import form_of, question_of, used_by
from slime_rollout.data.messages import kind, text_or_messages
from slime_rollout.eval_sets import data_files
from slime_rollout.rewards.choices import index_metadata
from slime_rollout.rewards.rules import check_scoring

logger = logging.getLogger(__name__)
T = TypeVar("T")

_INPUT_KEYS, _LABEL_KEY = ("prompt", "input"), "label"
# Integers beyond 64 bits are read as floats, and from here on several integers are the same float.
_INEXACT = 2.0**53
FIRST_ROWS = 100
"""Rows of a stream that are checked before a run."""
_SHOWN = 3  # bad rows that are named in a message
# Where other projects keep the answer: what a message advises.
_ANSWERS = ("ground_truth", "answer", "solution", "output", "completion", "response", "target")
_DEEPEST = 3  # names in a dotted one that a message advises


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of the fields that any row may have: tools or their JSON text, and an object with further values."""

    tool_key: str = "tools"
    metadata_key: str = "metadata"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The parts of every row: its place for messages, tools for the chat template, and further values.

    ``said`` is how a row that another project wrote is read; nothing for one of ours.
    """

    where: str
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """One row of a prompt file: a prompt and perhaps the expected answer. Its tools are in the metadata, too."""

    prompt: Prompt
    label: str | None = None


def check_row(raw: RawRow, config: RolloutConfig) -> PromptRow:
    """Check a row's format and that ``config`` can use it; says where and why not."""
    where, values, fields = raw.where, row_values(raw), config.data
    form = None if fields.input_key else form_of(values, "prompts")
    if form is not None:
        used, prompt = used_by(form), question_of(where, values, form)
    else:
        advice = "name it with --input-key"
        input_key, value = find_field(raw, values, fields.input_key, _INPUT_KEYS, "the prompt", advice)
        value = str(value) if type(value) is int else value  # such as the number of a task
        used, prompt = {input_key}, text_or_messages(f"{where}: {input_key!r}", value)
    label_key = fields.label_key or _LABEL_KEY
    label_value = _label_value(raw, values, fields.label_key)
    label = _label(f"{where}: {label_key!r}", label_value, fields.label_key)
    common = common_values(where, values, fields, used | {label_key})
    if common["tools"] is not None:
        common["metadata"]["tools"] = common["tools"]
    common["metadata"] |= index_metadata(label_value, common["metadata"])
    if not isinstance(prompt, str) and not config.takes_messages:
        raise DataError(f"{where}: the prompt is chat messages; add --apply-chat-template, or write it as text")
    if problem := check_scoring(config, common["metadata"], label):
        raise DataError(f"{where}: {problem}{'' if label is not None else _label_hint(raw, values, label_key)}")
    return PromptRow(prompt=prompt, label=label, said="" if form is None else form.said, **common)


def check_prompt_data(config: RolloutConfig) -> dict[str, int]:
    """Read every prompt file that a run will read, as :func:`check_prompt_file`; of streams, the first rows.

    Returns usable rows per path as given: the training prompts, if they are not streamed, then the held-out sets.
    """
    counts = {}
    for path, own, named in data_files(config):
        with named:
            if own is config and config.data.streaming_data:
                _check_stream(path, config)
            else:
                counts[path] = len(check_prompt_file(path, own))
    return counts


def check_prompt_file(path: str, config: RolloutConfig) -> list[PromptRow]:
    """The rows of one prompt file as ``config`` will use it; with ``--on-bad-data skip`` the usable ones.

    Raises `DataError` if the file breaks the format, a label is missing or unusable for the reward rule, or a prompt is
    chat messages without ``--apply-chat-template``.
    """
    return read_rows(path, functools.partial(check_row, config=config), config.data.on_bad_data)


def _check_stream(path: str, config: RolloutConfig) -> None:
    first_error = None
    seen = good = 0
    for _, raw in islice(PromptFile(path, streamed=True).rows(), FIRST_ROWS):
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
    """The values of ``make`` for the :func:`usable` rows of a file or slice; its `DataError` means a bad row."""

    def attempt(raw: RawRow) -> T | DataError:
        try:
            return make(raw)
        except DataError as error:
            return error

    return usable(path, (attempt(raw) for _, raw in PromptFile(path).rows()), on_bad_data)


def usable(path: str, rows: Iterable[T | DataError], on_bad_data: str, *, logs: bool = True) -> list[T]:
    """The rows of a file that can be used; a `DataError` if others are not to be skipped, or none can be used.

    Those that are skipped are logged, if it ``logs``.
    """
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
        if not logs:
            return good
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
        # A row is the same in every format: columns cannot tell an absent field from null, and give every object the
        # fields of all, so what is null, or NaN as pandas writes it, is left out. Dates become ISO text; decimals and
        # UUIDs text.
        return {key: _plain(f"{raw.where}: {key!r}", value) for key, value in raw.value.items() if not _is_null(value)}
    try:
        values = orjson.loads(raw.value)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"{raw.where}: invalid JSON: {error.msg} (column {error.colno}); "
            "write one object per line, or one array of them"
        ) from None
    if not isinstance(values, dict):
        raise DataError(f"{raw.where}: a row must be a JSON object, got {kind(values)}")
    return values


ABSENT = object()
"""The value of a field that a row does not have."""


def value_at(values: dict[str, Any], name: str) -> Any:
    """The value of a field; of one inside an object by its dotted name, unless a field has that very name."""
    if name in values:
        return values[name]
    places = [place for place, letter in enumerate(name) if letter == "."]
    for place in reversed(places):
        inner = values.get(name[:place])
        if isinstance(inner, dict) and (value := value_at(inner, name[place + 1 :])) is not ABSENT:
            return value
    return ABSENT


def is_null(raw: RawRow, values: dict[str, Any], name: str) -> bool:
    """Whether a row has a field and no value in it; `row_values` leaves out what is null in a table."""
    value = value_at(raw.value if isinstance(raw.value, dict) else values, name)
    return value is not ABSENT and _is_null(value)


def find_field(
    raw: RawRow, values: dict[str, Any], given: str | None, usual: tuple[str, ...], what: str, advice: str
) -> tuple[str, Any]:
    """The field of a row that holds ``what``, and its value: the given one, or the first usual one that is not null."""
    wanted = usual if given is None else (given,)
    found = {name: value for name in wanted if (value := value_at(values, name)) is not ABSENT}
    for name, value in found.items():
        if value is not None:
            return name, value
    if null := next((name for name in wanted if is_null(raw, values, name)), None):
        return null, None
    names = " or ".join(map(repr, wanted))
    hint = _nested_hint(values, wanted)
    raise DataError(f"{raw.where}: no field {names} for {what}; the row has {sorted(values)}; {advice}{hint}")


def _nested_hint(values: dict[str, Any], names: Iterable[str]) -> str:
    found = next((path for name in names for path in _paths(values) if path.endswith(f".{name}")), None)
    return "" if found is None else f"; there is {found}"


def _paths(values: dict[str, Any], depth: int = 1) -> Iterator[str]:
    """Dotted names of the fields of a row that hold no objects."""
    for name, value in values.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from (f"{name}.{inner}" for inner in _paths(value, depth + 1))
        else:
            yield name


def common_values(
    where: str, values: dict[str, Any], fields: Fields | DataConfig, used: set[str | None]
) -> dict[str, Any]:
    """The fields of `Row`. Values that are not ``used`` otherwise are added to the metadata."""
    known = used | {fields.tool_key, fields.metadata_key}
    metadata, tools = (value_at(values, key) for key in (fields.metadata_key, fields.tool_key))
    metadata = None if metadata is ABSENT else metadata
    if not isinstance(metadata, dict | None):
        raise DataError(f"{where}: {fields.metadata_key!r} must be an object, got {kind(metadata)}")
    others = {name: value for name, value in values.items() if name not in known}
    tools = _tools(f"{where}: {fields.tool_key!r}", None if tools is ABSENT else tools)
    return {"where": where, "tools": tools, "metadata": others | (metadata or {})}


def _label_value(raw: RawRow, values: dict[str, Any], given: str | None) -> Any:
    """The value of the label's field, which must be there and not null if it is ``given``."""
    value = value_at(values, given or _LABEL_KEY)
    if given is not None and (value is None or value is ABSENT):
        if is_null(raw, values, given):
            raise DataError(
                f"{raw.where}: the label {given!r} is null; write one, or leave such rows out with --on-bad-data skip"
            )
        hint = _nested_hint(values, [given])
        raise DataError(f"{raw.where}: no field {given!r}, which --label-key names; the row has {sorted(values)}{hint}")
    return None if value is ABSENT else value


def _label_hint(raw: RawRow, values: dict[str, Any], label_key: str) -> str:
    """A hint at what a row without a label has in its place."""
    if is_null(raw, values, label_key):
        return f"; its {label_key!r} is null"
    names = list(_paths(values))
    found = next((path for name in _ANSWERS for path in names if path.rpartition(".")[2] == name), None)
    return "" if found is None else f", such as --label-key {found}"


def _label(where: str, value: Any, given: str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) >= _INEXACT:
        raise DataError(f"{where} is a number of too many digits to be read exactly; write it as a string")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    advice = "; leave --label-key out, and it is in the sample's metadata" if given else ""
    if given and isinstance(value, dict) and (inner := next(_paths({given: value}), given)) != given:
        advice += f"; or name a field of it, such as {inner}"
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
