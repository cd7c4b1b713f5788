"""Look at prompt files before anything starts: no tokenizer, no engine, a second at most for usual files."""

from __future__ import annotations

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data.jsonl import PromptRow, RowFields, read_prompts
from slime_rollout.rewards.rules import check_label


def check_prompt_data(config: RolloutConfig) -> dict[str, int]:
    """Read every prompt file that a run will read.

    Returns:
        Rows per path as given: the training prompts, then the held-out sets.

    Raises:
        DataError: As :func:`check_prompt_file`.
    """
    return {path: len(check_prompt_file(path, config)) for path in (config.prompt_data, *config.eval_sets.values())}


def check_prompt_file(path: str, config: RolloutConfig) -> list[PromptRow]:
    """Read one prompt file as ``config`` will use it.

    Returns:
        Its rows.

    Raises:
        DataError: The file breaks the format, a label is missing or unusable for the reward rule, or a prompt is
            chat messages without ``--apply-chat-template``.
    """
    fields = RowFields(input_key=config.input_key, label_key=config.label_key, metadata_key=config.metadata_key)
    rows = read_prompts(path, fields)
    for row in rows:
        if not isinstance(row.prompt, str) and not config.apply_chat_template:
            raise DataError(f"{row.where}: the prompt is chat messages; add --apply-chat-template, or write it as text")
        if config.rule is not None and (problem := check_label(config.rule, row.label)):
            raise DataError(f"{row.where}: {problem}")
    return rows
