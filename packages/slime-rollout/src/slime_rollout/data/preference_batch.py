"""Preference pairs, tokenized and batched as the DPO and reward-model losses of slime_core take them."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime_core.errors import DataError
from slime_core.types import Group, Sample
from slime_rollout.data.chat_mask import ChatEncoder, EncodedChat
from slime_rollout.data.conversations import read_rows
from slime_rollout.data.order import epoch_order
from slime_rollout.data.preference import PreferenceFields, PreferenceRow, preference_row

logger = logging.getLogger(__name__)

CHOSEN_REWARD, REJECTED_REWARD = 1.0, 0.0


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch:
    """P pairs: chosen, rejected, chosen, rejected, …; T tokens of their 2P responses, one after the other.

    Attributes:
        samples: 2P samples.
        lengths: Tokens of each response, 2P numbers that add up to T: ``lengths`` of ``slime_core.ops.dpo_loss``.
        loss_mask: T numbers, 1 where a token counts: its ``mask_T``.
        score_positions: Per sample, the place in its ``tokens`` of the last token that counts, where a reward model's
            score is read.
        margins: P numbers, 0 for a pair without one; ``None`` if no pair has one: ``margins_P`` of
            ``slime_core.ops.reward_model_loss``.
    """

    samples: list[Sample]
    lengths: list[int]
    loss_mask: list[int]
    score_positions: list[int]
    margins: list[float] | None


def preference_batch(groups: Sequence[Group]) -> PreferenceBatch:
    """Batch pairs, such as a `RolloutDataSource` over a :class:`PreferenceDataset` gives them.

    Args:
        groups: P pairs, each of the chosen and the rejected sample.

    Raises:
        DataError: A group is no such pair.
    """
    for group in groups:
        if [sample.reward for sample in group] != [CHOSEN_REWARD, REJECTED_REWARD]:
            rewards = [sample.reward for sample in group]
            raise DataError(f"a preference pair is a chosen and a rejected sample, rewards 1 and 0; got {rewards}")
    samples = [sample for group in groups for sample in group]
    given = [group[0].train_metadata.get("margin") for group in groups]
    return PreferenceBatch(
        samples=samples,
        lengths=[sample.response_length for sample in samples],
        loss_mask=[entry for sample in samples for entry in sample.trained_mask],
        score_positions=[_score_position(sample) for sample in samples],
        margins=None if all(margin is None for margin in given) else [margin or 0.0 for margin in given],
    )


class PreferenceEncoder:
    """Turns pairs into tokens.

    In chat pairs the assistant's turns after the prompt are trained on. In text pairs the prompt is tokenized as for
    generation and the response behind it, so both sides of a pair have the same prompt tokens; then comes the
    tokenizer's end token.

    Args:
        tokenizer: A transformers tokenizer.
        chat: What encodes messages; ``None`` for text pairs alone.
    """

    def __init__(self, tokenizer: Any, chat: ChatEncoder | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat

    def encode(self, row: PreferenceRow, *, max_length: int | None = None) -> tuple[EncodedChat, EncodedChat]:
        """The chosen and the rejected side of a pair.

        Raises:
            DataError: The template cannot be used for it, or it is chat and the encoder is for text.
        """
        try:
            chosen, rejected = self._side(row, row.chosen), self._side(row, row.rejected)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None
        return chosen.cut(max_length), rejected.cut(max_length)

    def response(self, encoded: EncodedChat) -> str:
        """The response of one side as text."""
        return str(self._tokenizer.decode(encoded.tokens[encoded.prompt_length :], skip_special_tokens=False))

    def _side(self, row: PreferenceRow, response: Any) -> EncodedChat:
        if isinstance(row.prompt, str):
            return self._text(row.prompt, response)
        if self._chat is None:
            raise DataError("the pair is chat messages; give a ChatEncoder, or write it as text")
        messages = [*row.prompt, *response]
        return self._chat.encode(messages, tools=row.tools, first_trained=len(row.prompt))

    def _text(self, prompt: str, response: str) -> EncodedChat:
        special = not prompt.startswith(self._tokenizer.bos_token or "\0")
        before = list(self._tokenizer(prompt, add_special_tokens=special)["input_ids"])
        end = self._tokenizer.eos_token_id
        if before and before[-1] == end:
            before.pop()
        after = list(self._tokenizer(response, add_special_tokens=False)["input_ids"])
        if end is not None and after[-1:] != [end]:
            after.append(end)
        return EncodedChat(tokens=before + after, loss_mask=[0] * len(before) + [1] * len(after))


class PreferenceDataset:
    """Pairs, tokenized. A `RolloutDataSource` with ``samples_per_prompt=2`` deals them out: order, epochs, state.

    Args:
        pairs: Rows with their chosen and rejected tokens, at least one.
        encoder: What made the tokens.
    """

    def __init__(
        self, pairs: Iterable[tuple[PreferenceRow, EncodedChat, EncodedChat]], encoder: PreferenceEncoder
    ) -> None:
        self._pairs = list(pairs)
        self._encoder = encoder
        if not self._pairs:
            raise DataError("a data set needs at least one preference pair")

    @classmethod
    def load(
        cls,
        path: str,
        encoder: PreferenceEncoder,
        *,
        max_length: int | None = None,
        fields: PreferenceFields | None = None,
        on_bad_data: str = "error",
    ) -> PreferenceDataset:
        """Read, check and tokenize a file.

        Left out are pairs of which ``max_length`` leaves a side without a response, or both sides the same.

        Args:
            path: The file, perhaps with a slice.
            encoder: Makes the tokens.
            max_length: Most tokens of a side; what is longer loses its end.
            fields: The names of the fields.
            on_bad_data: As for `read_preferences`; a pair that the template refuses is bad, too.

        Raises:
            DataError: The file breaks its format, the template cannot be used, or no pair is left.
        """

        def encoded_pair(where: str, values: dict[str, Any]) -> tuple[PreferenceRow, EncodedChat, EncodedChat]:
            row = preference_row(fields or PreferenceFields(), where, values)
            return row, *encoder.encode(row, max_length=max_length)

        pairs = read_rows(path, encoded_pair, on_bad_data)
        kept = [pair for pair in pairs if _differs(*pair[1:])]
        if not kept:
            raise DataError(f"{path}: none of the {len(pairs)} pairs differs within {max_length} tokens")
        cut = sum(chosen.truncated or rejected.truncated for _, chosen, rejected in kept)
        if cut or len(kept) < len(pairs):
            logger.warning(
                "%s: of %d pairs left out %d that do not differ within %s tokens, and cut %d",
                *(path, len(pairs), len(pairs) - len(kept), max_length, cut),
            )
        return cls(kept, encoder)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def digest(self) -> str:
        """A hash of all tokens, masks, margins and metadata: equal for equal data sets, in every process."""
        hasher = hashlib.blake2b(digest_size=16)
        for row, *sides in self._pairs:
            tokens = [[side.tokens, side.loss_mask] for side in sides]
            hasher.update(orjson.dumps([row.metadata, row.margin, tokens]))
        return hasher.hexdigest()

    def epoch_order(self, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
        """Places of the pairs that one epoch hands out, in order; see `order.epoch_order`."""
        return epoch_order([len(self)], None, epoch=epoch, shuffle=shuffle, seed=seed)

    def group(self, place: int, *, group_index: int, first_index: int, size: int) -> Group:
        """The chosen (reward 1) and the rejected sample (reward 0) of one pair.

        Raises:
            DataError: ``size`` is not 2.
        """
        if size != 2:
            raise DataError(f"a preference pair has 2 samples, not {size}; set samples_per_prompt to 2")
        row, *sides = self._pairs[place]
        rewards = (CHOSEN_REWARD, REJECTED_REWARD)
        return [
            side.sample(
                index=first_index + offset,
                group_index=group_index,
                prompt=copy.deepcopy(row.prompt),
                response=self._encoder.response(side),
                reward=rewards[offset],
                metadata=copy.deepcopy(row.metadata),
                train_metadata={} if row.margin is None else {"margin": row.margin},
            )
            for offset, side in enumerate(sides)
        ]


def _differs(chosen: EncodedChat, rejected: EncodedChat) -> bool:
    return 1 in chosen.loss_mask and 1 in rejected.loss_mask and chosen.tokens != rejected.tokens


def _score_position(sample: Sample) -> int:
    mask = sample.trained_mask
    return len(sample.tokens) - 1 - mask[::-1].index(1)
