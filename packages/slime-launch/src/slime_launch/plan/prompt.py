"""The first prompt as the engines get it, or the first row as it is trained on, with the tokens that the loss counts.

Importing transformers takes most of a plan's time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slime_core.errors import DataError
from slime_rollout.checks import (
    EncodedChat,
    Measured,
    PromptEncoder,
    PromptFile,
    RawRow,
    check_row,
    encode_row,
    template_tokenizer,
)
from slime_rollout.config import RolloutConfig
from slime_rollout.service import DataSpec

T = TypeVar("T")


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
    data = config.data
    tokenizer = template_tokenizer(data.hf_checkpoint, trust_remote_code=data.trust_remote_code)
    encoder = PromptEncoder.of(config, tokenizer)

    def render(raw: RawRow) -> FirstPrompt:
        row = check_row(raw, config)
        tokens = encoder.encode(row.prompt, row.tools)
        text = tokenizer.decode(tokens) if tokens else "(a custom generate function renders it)"
        return FirstPrompt(path=path, text=str(text), tokens=len(tokens), label=row.label)

    return _first_usable(path, render, config.data.on_bad_data, streamed=config.data.streaming_data)


@dataclass(frozen=True, kw_only=True)
class FirstSample:
    """A sample of the first row of a data set, of ``tokens`` tokens, ``trained`` of which the loss counts."""

    path: str
    title: str
    text: str
    tokens: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class FirstRow:
    """The samples of the first row, and the tokens of the longest sample that there is, or may be, if known."""

    samples: list[FirstSample]
    longest: int | None


def first_row(spec: DataSpec, measured: Measured) -> FirstRow:
    """Render the first row of ``--prompt-data`` that can be used.

    Rows are as long as they may be where --rollout-max-context-len says so, else as long as was ``measured``; where
    not all were measured, one has most letters, and counts.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or has no chat template where one is asked for.
        DataError: The row cannot be used.
    """
    data = spec.rollout.data
    tokenizer = template_tokenizer(data.hf_checkpoint, trust_remote_code=data.trust_remote_code)
    path = data.prompt_paths[0]
    encode = functools.partial(encode_row, spec=spec, tokenizer=tokenizer)
    titles = ("chosen", "rejected") if spec.rows == "pairs" else ("conversation",)
    samples = [
        FirstSample(
            path=path,
            title=title,
            text=str(tokenizer.decode(encoded.tokens)),
            tokens=len(encoded.tokens),
            trained=sum(encoded.loss_mask),
        )
        for title, encoded in zip(titles, _first_usable(path, encode, data.on_bad_data), strict=True)
    ]
    longest = spec.max_length
    if spec.rollout.sampling.rollout_max_context_len is None:
        counted = [measured.files[path].longest for path in data.prompt_paths if path in measured.files]
        with contextlib.suppress(DataError):  # a bad row that is skipped, so that its length is not known
            longest = max(counted) if len(counted) == len(data.prompt_paths) else _longest(data.prompt_paths, encode)
    return FirstRow(samples=samples, longest=longest)


def _longest(paths: Sequence[str], encode: Callable[[RawRow], Sequence[EncodedChat]]) -> int:
    """Tokens of the row with most letters."""
    rows = (raw for path in paths for _, raw in PromptFile(path).rows())
    most = max(rows, key=lambda raw: len(raw.value if isinstance(raw.value, bytes) else str(raw.value)))
    return max(len(encoded.tokens) for encoded in encode(most))


def _first_usable(path: str, make: Callable[[RawRow], T], on_bad_data: str, *, streamed: bool = False) -> T:
    """The first row, made into something; where bad ones are skipped, the first that can be used."""
    for _, raw in PromptFile(path, streamed=streamed).rows():
        try:
            return make(raw)
        except DataError:
            if on_bad_data != "skip":
                raise
    raise DataError(f"{path} has no row that can be used")
