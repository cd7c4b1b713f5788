"""Look at prompt files before anything starts: no tokenizer, no engine, a second at most for usual files."""

from __future__ import annotations

from itertools import islice

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data.faults import Faults
from slime_rollout.data.read import raw_rows
from slime_rollout.data.rows import PromptRow, RawRow, RowFields, make_row
from slime_rollout.data.stream_file import Mark, StreamFile
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.rewards.registry import check_scoring

_FIRST_ROWS = 100


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
            check_stream(path, config)
        else:
            counts[path] = len(check_prompt_file(path, config, tell=tell))
    for held_out in read_eval_sets(config):
        with held_out.named():
            counts[held_out.path] = len(check_prompt_file(held_out.path, held_out.config, tell=tell))
    return counts


def check_stream(path: str, config: RolloutConfig) -> None:
    """Open a prompt file that will be streamed, and look at its first rows.

    Raises:
        DataError: It cannot be streamed, or one of those rows cannot be used and is not to be skipped, or none can.
    """
    bad: list[DataError] = []
    seen = 0
    for _, raw in islice(StreamFile(path).rows(Mark()), _FIRST_ROWS):
        seen += 1
        try:
            check_row(raw, config)
        except DataError as error:
            if config.on_bad_data == "error":
                raise
            bad.append(error)
    if len(bad) == seen:
        raise DataError(f"{bad[0]} (none of the first {seen} rows of {path} can be used)")


def check_prompt_file(path: str, config: RolloutConfig, *, tell: bool = True) -> list[PromptRow]:
    """Read one prompt file as ``config`` will use it.

    Args:
        path: The file, perhaps with a slice.
        config: What the run will do with it.
        tell: Log rows that are left out.

    Returns:
        Its rows; with ``--on-bad-data skip`` the usable ones.

    Raises:
        DataError: The file breaks the format, a label is missing or unusable for the reward rule, or a prompt is
            chat messages without ``--apply-chat-template``.
    """
    faults = Faults(path, config.on_bad_data)
    rows = [row for raw in raw_rows(path) if (row := faults.catch(check_row, raw, config)) is not None]
    faults.settle(tell=tell)
    return rows


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
