"""Prompts of one file, tokenized."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.data.check import check_prompt_file
from slime_rollout.data.jsonl import PromptRow
from slime_rollout.data.tokenizer import PromptEncoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    """A row of the file and the token ids of its prompt."""

    row: PromptRow
    tokens: list[int]


class PromptDataset:
    """Prompts in the file's order.

    Args:
        prompts: The prompts, at least one.
    """

    def __init__(self, prompts: Iterable[TokenizedPrompt]) -> None:
        self._prompts = list(prompts)
        if not self._prompts:
            raise DataError("a data set needs at least one prompt")

    @classmethod
    def load(cls, path: str, config: RolloutConfig, encoder: PromptEncoder) -> PromptDataset:
        """Read, check and tokenize a file, leaving out prompts longer than ``--rollout-max-prompt-len``.

        Raises:
            DataError: The file breaks its format, or no prompt is short enough.
        """
        prompts = [_tokenize(row, encoder) for row in check_prompt_file(path, config)]
        limit = config.rollout_max_prompt_len
        kept = [prompt for prompt in prompts if limit is None or len(prompt.tokens) <= limit]
        if not kept:
            shortest = min(len(prompt.tokens) for prompt in prompts)
            raise DataError(
                f"{path}: all {len(prompts)} prompts are longer than --rollout-max-prompt-len {limit}; "
                f"the shortest has {shortest} tokens"
            )
        if left_out := len(prompts) - len(kept):
            logger.warning("%s: left out %d of %d prompts, longer than %s tokens", path, left_out, len(prompts), limit)
        return cls(kept)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def digest(self) -> str:
        """A hash of all prompts, labels and token ids: equal for equal data sets, in every process."""
        hasher = hashlib.blake2b(digest_size=16)
        for prompt in self._prompts:
            hasher.update(orjson.dumps([prompt.row.prompt, prompt.row.label, prompt.row.metadata, prompt.tokens]))
        return hasher.hexdigest()

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> list[Sample]:
        """Fresh samples of one prompt.

        Args:
            place: Which prompt, from 0.
            group_index: Number of the group.
            first_index: Number of its first sample; the others count on from there.
            size: Number of samples.
        """
        prompt = self._prompts[place]
        return [
            Sample(
                index=first_index + offset,
                group_index=group_index,
                prompt=copy.deepcopy(prompt.row.prompt),
                label=prompt.row.label,
                tokens=list(prompt.tokens),
                metadata=copy.deepcopy(prompt.row.metadata),
            )
            for offset in range(size)
        ]


def _tokenize(row: PromptRow, encoder: PromptEncoder) -> TokenizedPrompt:
    try:
        return TokenizedPrompt(row=row, tokens=encoder.encode(row.prompt))
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from None
