"""Samples that a run keeps for its report: the first of each rollout, and a dropped group for each reason.

Each rollout has a file, ``samples/rollout_0000012.json.gz`` in the run's directory, and others of the trainer's ranks
with what those computed for the samples in it.
"""

from __future__ import annotations

import functools
import gzip
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.errors import SlimeError
from slime_core.files import whole_file
from slime_core.types import RolloutBatch, RolloutColumns, Sample
from slime_core.types.train import SHOWN
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import load_tokenizer
from slime_rollout.errors import REWARD_FAILURE

logger = logging.getLogger(__name__)
SAMPLES_DIR = "samples"
MOST_TOKENS = 2000
"""Response tokens of a sample that are kept: half from its beginning, half from its end."""
MOST_CHARACTERS = 8000
"""Of a prompt, and of each text in the metadata."""
_LONGEST_CHARACTER = 4  # bytes, and so tokens that may make it up
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def mark_shown(columns: RolloutColumns, count: int) -> None:
    """Tell the trainer's ranks which samples are shown, the first ``count``, by an extra column."""
    if count:
        columns.samples[SHOWN] = np.arange(sum(columns.group_sizes)) < count


def write_shown(batch: RolloutBatch, config: RolloutConfig, count: int, directory: str | Path) -> None:
    """Write the first ``count`` samples of a rollout into the run's directory; the file appears whole or not at all."""
    if not count:
        return
    tokenizer = _tokenizer(config.data.hf_checkpoint, config.data.trust_remote_code)
    chosen: list[tuple[Sample, str | None]] = [(sample, None) for sample in batch.samples[:count]]
    chosen += [(sample, reason) for reason, group in batch.dropped.items() for sample in group[:count]]
    head = {"rollout": batch.rollout_id, "weight_version": batch.weight_version}
    key = config.rewards.reward_key
    rows = [{**head, "dropped": reason, **_row(one, tokenizer, key)} for one, reason in chosen]
    path = Path(directory) / SAMPLES_DIR / f"rollout_{batch.rollout_id:07d}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_bytes(gzip.compress(json.dumps(rows).encode(), compresslevel=3))


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; a character of several tokens is the first one's. Numbers without a tokenizer."""
    if tokenizer is None:
        return [f" {token}" for token in tokens]
    texts: list[str] = []
    while (at := len(texts)) < len(tokens):
        sizes = range(1, min(_LONGEST_CHARACTER, len(tokens) - at) + 1)
        parts = [tokenizer.decode(tokens[at : at + size], skip_special_tokens=False) for size in sizes[:1]]
        if _NO_CHARACTER in parts[0]:  # a part of a character, most likely
            parts += [tokenizer.decode(tokens[at : at + size], skip_special_tokens=False) for size in sizes[1:]]
        whole = next((number for number, part in enumerate(parts) if _NO_CHARACTER not in part), 0)
        texts += [parts[whole]] + [""] * whole
    return texts


def _row(sample: Sample, tokenizer: Any, reward_key: str | None) -> dict[str, Any]:
    length = sample.response_length
    half = MOST_TOKENS // 2
    kept = list(range(length)) if length <= MOST_TOKENS else [*range(half), *range(length - half, length)]
    tokens, reward, log_probs = sample.response_tokens, sample.reward, sample.rollout_log_probs
    return {
        "index": sample.index,
        "group": sample.group_index,
        "trajectory": sample.trajectory,
        "prompt": _cut(sample.prompt),
        "label": sample.label,
        "reward": None if reward is None else sample.scalar_reward(reward_key),
        "rewards": reward if isinstance(reward, dict) else None,
        "status": sample.status.value,
        "failure": sample.metadata.get(REWARD_FAILURE),
        "length": length,
        "cut": None if length <= MOST_TOKENS else {"at": half, "left_out": length - MOST_TOKENS},
        "tokens": token_texts(tokenizer, [tokens[at] for at in kept]),
        "mask": None if sample.trained_tokens == length else [sample.trained_mask[at] for at in kept],
        "versions": [sample.weight_versions[at] for at in kept] if sample.weight_versions else None,
        "log_probs": None if log_probs is None else [round(log_probs[at], 4) for at in kept],
        "metadata": dict(_short(sample.metadata)),
    }


def _cut(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt if len(prompt) <= MOST_CHARACTERS else f"{prompt[:MOST_CHARACTERS]} …"
    return [message | {"content": _cut(message["content"])} if "content" in message else message for message in prompt]


def _short(metadata: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value)
        yield name, value if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"


@functools.cache
def _tokenizer(hf_checkpoint: str, trust_remote_code: bool) -> Any | None:
    """``None``, and a line in the log, where there is none: what is only shown must not end a run."""
    try:
        return load_tokenizer(hf_checkpoint, trust_remote_code=trust_remote_code)
    except SlimeError as error:
        logger.warning("the report will show tokens as numbers: %s", error)
        return None
