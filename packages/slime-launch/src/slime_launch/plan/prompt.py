"""The first prompt as the engines will get it. Importing transformers takes most of a plan's time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_rollout.config import RolloutConfig
from slime_rollout.data import PromptEncoder, load_tokenizer
from slime_rollout.data.files import PromptFile
from slime_rollout.data.rows import check_row


@dataclass(frozen=True, kw_only=True)
class FirstPrompt:
    """The first prompt of the first data set; ``text`` is its tokens in words again."""

    path: str
    text: str
    tokens: int
    label: str | None


def first_prompt(config: RolloutConfig) -> FirstPrompt:
    """Render the first row of ``--prompt-data``.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or has no chat template where one is asked for.
        DataError: The row cannot be used, or gives no token.
    """
    path = config.data.prompt_paths[0]
    tokenizer = _tokenizer(config.data.hf_checkpoint)
    encoder = PromptEncoder.of(config, tokenizer)
    for _, raw in PromptFile(path, streamed=config.data.streaming_data).rows():
        row = check_row(raw, config)
        tokens = encoder.encode(row.prompt, row.tools)
        text = tokenizer.decode(tokens) if tokens else "(a custom generate function renders it)"
        return FirstPrompt(path=path, text=str(text), tokens=len(tokens), label=row.label)
    raise DataError(f"{path} has no row; give prompts")


def _tokenizer(directory: str) -> Any:
    """The tokenizer without `AutoTokenizer`, which imports torch for seconds, where there is a tokenizer.json."""
    if (Path(directory) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(directory)
        except Exception:  # whatever is wrong with it, the next line says so
            pass
    return load_tokenizer(directory)
