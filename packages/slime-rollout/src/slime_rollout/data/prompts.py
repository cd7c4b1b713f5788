"""Rows of prompt files, and the check of all prompt files before a run: no tokenizer, a second for usual files.

    {"prompt": "57 + 26 =", "label": "83", "metadata": {"source": "sums"}}
    {"prompt": [{"role": "user", "content": "57 + 26?"}], "label": 83}

Fields that are neither prompt, label, tools nor metadata are kept beside the metadata's own entries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import islice
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Prompt
from slime_rollout.config import RolloutConfig
from slime_rollout.data.files import PromptFile, RawRow
from slime_rollout.data.rows import Fields, Row, common_values, field_name, kind, read_messages, read_rows, row_values
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.rewards.registry import check_scoring

_INPUT_KEYS, _LABEL_KEY = ("prompt", "input"), "label"
# Integers beyond 64 bits are read as floats, and from here on several integers are the same float.
_INEXACT = 2.0**53
_FIRST_ROWS = 100  # of a stream, that are checked before a run


@dataclass(frozen=True, kw_only=True)
class RowFields(Fields):
    """Which fields of a row hold what, besides those of `Fields`.

    Attributes:
        input_key: Field of the prompt; unset: ``prompt``, then ``input``.
        label_key: Field of the answer, required if given; unset: ``label`` in rows that have it.
    """

    input_key: str | None = None
    label_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """One row of a prompt file, with what any `Row` has; its tools are in the metadata too, for generate functions.

    Attributes:
        prompt: Text, or chat messages.
        label: The expected answer as text, if the row has one.
    """

    prompt: Prompt
    label: str | None = None


def read_prompts(path: str, fields: RowFields | None = None, *, on_bad_data: str = "error") -> list[PromptRow]:
    """Read a prompt file, or the slice of it that ``path`` names.

    Args:
        path: Path of the file or directory, with ``@[a:b]`` behind it for some rows only.
        fields: The names of the fields.
        on_bad_data: For rows that break the format: ``error``, or ``skip`` and log how many and which.

    Raises:
        DataError: The file is missing, empty or damaged, or a row breaks the format; says which and how.
    """
    return read_rows(path, functools.partial(make_row, fields=fields or RowFields()), on_bad_data)


def make_row(raw: RawRow, fields: RowFields) -> PromptRow:
    """Check a row and take it apart.

    Raises:
        DataError: It breaks the format; says where and how.
    """
    where, values = raw.where, row_values(raw)
    input_key = field_name(where, values, fields.input_key, _INPUT_KEYS, "the prompt", "name it with --input-key")
    label_key = fields.label_key or _LABEL_KEY
    if fields.label_key is not None and values.get(label_key) is None:
        raise DataError(f"{where}: no field {label_key!r}, which --label-key names; the row has {sorted(values)}")
    common = common_values(where, values, fields, {input_key, label_key})
    if common["tools"] is not None:
        common["metadata"]["tools"] = common["tools"]
    return PromptRow(
        prompt=_prompt(f"{where}: {input_key!r}", values[input_key]),
        label=_label(f"{where}: {label_key!r}", values.get(label_key)),
        **common,
    )


def check_row(raw: RawRow, config: RolloutConfig) -> PromptRow:
    """Take one row apart and check that ``config`` can use it.

    Raises:
        DataError: It cannot; says where and why.
    """
    fields = RowFields(
        input_key=config.input_key,
        label_key=config.label_key,
        metadata_key=config.metadata_key,
        tool_key=config.tool_key,
    )
    row = make_row(raw, fields)
    if not isinstance(row.prompt, str) and not config.takes_messages:
        raise DataError(f"{row.where}: the prompt is chat messages; add --apply-chat-template, or write it as text")
    if problem := check_scoring(config, row.metadata, row.label):
        raise DataError(f"{row.where}: {problem}")
    return row


def check_prompt_data(config: RolloutConfig, *, tell: bool = True) -> dict[str, int]:
    """Read every prompt file that a run will read; of those to be streamed, the first rows.

    Args:
        config: What the run will do with them.
        tell: Log rows that ``--on-bad-data skip`` leaves out.

    Returns:
        Usable rows per path as given: the training prompts, if they are not streamed, then the held-out sets.

    Raises:
        DataError: As :func:`check_prompt_file`.
    """
    counts = {}
    for path in config.prompt_paths:
        if config.streaming_data:
            _check_stream(path, config)
        else:
            counts[path] = len(check_prompt_file(path, config, tell=tell))
    for held_out in read_eval_sets(config):
        with held_out.named():
            counts[held_out.path] = len(check_prompt_file(held_out.path, held_out.config, tell=tell))
    return counts


def check_prompt_file(path: str, config: RolloutConfig, *, tell: bool = True) -> list[PromptRow]:
    """Read one prompt file as ``config`` will use it.

    Returns:
        Its rows; with ``--on-bad-data skip`` the usable ones.

    Raises:
        DataError: The file breaks the format, a label is missing or unusable for the reward rule, or a prompt is
            chat messages without ``--apply-chat-template``.
    """
    return read_rows(path, functools.partial(check_row, config=config), config.on_bad_data, log=tell)


def _check_stream(path: str, config: RolloutConfig) -> None:
    first_error = None
    seen = good = 0
    for _, raw in islice(PromptFile(path, streamed=True).rows(), _FIRST_ROWS):
        seen += 1
        try:
            check_row(raw, config)
            good += 1
        except DataError as error:
            if config.on_bad_data == "error":
                raise
            first_error = first_error or error
    if not good:
        raise DataError(f"{first_error} (none of the first {seen} rows of {path} can be used)")


def _prompt(where: str, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return read_messages(where, value)
    raise DataError(f"{where} must be a string or a list of chat messages, got {kind(value)}")


def _label(where: str, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) >= _INEXACT:
        raise DataError(f"{where} is a number of too many digits to be read exactly; write it as a string")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{where} must be a string or a number, got {kind(value)}")
