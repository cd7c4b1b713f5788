"""Conversations to token ids, with a mask of the tokens that the model writes.

The template's whole rendering is tokenized once, so the tokens are its own. A template that marks the assistant's
words with ``{% generation %}`` says itself which they are; for others :mod:`slime_rollout.data.turns` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.types import Message, Sample, Status
from slime_rollout.data.rows import TURN_MASK_KEY
from slime_rollout.data.template_forms import suited
from slime_rollout.data.turns import Render, Turn, TurnFinder

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """A conversation as tokens.

    Attributes:
        tokens: N token ids.
        loss_mask: N numbers, 1 where the token is the model's and trained on.
        truncated: Whether tokens were cut off at the end.
    """

    tokens: list[int]
    loss_mask: list[int]
    truncated: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one; N if none is trained."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.tokens)

    def sample(self, *, response: str, **fields: Any) -> Sample:
        """The conversation as a sample, its response from the first trained token on.

        Args:
            response: The response as text.
            **fields: Further fields of the sample.
        """
        start = self.prompt_length
        return Sample(
            tokens=list(self.tokens),
            response=response,
            response_length=len(self.tokens) - start,
            loss_mask=self.loss_mask[start:],
            status=Status.TRUNCATED if self.truncated else Status.COMPLETED,
            **fields,
        )

    def cut(self, max_length: int | None) -> EncodedChat:
        """The first ``max_length`` tokens with their mask."""
        if max_length is None or len(self.tokens) <= max_length:
            return self
        return EncodedChat(tokens=self.tokens[:max_length], loss_mask=self.loss_mask[:max_length], truncated=True)


class ChatEncoder:
    """Turns conversations into tokens and loss masks, with the tokenizer's chat template.

    Trained are the assistant's own words, from the end of the generation prompt on, and the token that ends the turn.
    A token that reaches over the start of a turn is not trained on.

    Args:
        tokenizer: A transformers tokenizer of the fast kind, which knows where each token stands in the text.
        template_kwargs: Further arguments of the template, such as ``{"enable_thinking": False}``.
        end_of_turn: A special token to write and train after the last turn where the template writes none: GLM ends a
            turn by the start of the next message, so ``<|user|>`` teaches the model to stop. Without it nothing is
            added, and the tokens are the template's alone.

    Raises:
        ConfigError: The tokenizer has no chat template, is not fast, or does not have ``end_of_turn``.
    """

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, end_of_turn: str | None = None
    ) -> None:
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {name} has no chat template; use a chat model's directory")
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer of {name} does not know where its tokens stand; add a tokenizer.json")
        added = tokenizer.added_tokens_decoder.values()
        specials = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        if end_of_turn is not None and end_of_turn not in specials:
            raise ConfigError(f"end_of_turn {end_of_turn!r} is no special token of {name}; it has {sorted(specials)}")
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._end_of_turn = end_of_turn
        alternatives = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
        self._special = re.compile(alternatives or r"(?!)")

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        first_trained: int = 0,
        max_length: int | None = None,
    ) -> EncodedChat:
        """Encode one conversation.

        Args:
            messages: The messages; those of the role ``assistant`` are trained on, unless their ``step_loss_mask``
                is 0.
            tools: Descriptions of tools, for the template.
            first_trained: Position from 0 of the first message that may be trained on.
            max_length: Most tokens; what is longer loses its end.

        Raises:
            DataError: The template refuses the messages, or does not show where a turn is.
        """
        clean = [{key: value for key, value in message.items() if key != TURN_MASK_KEY} for message in messages]
        left_out = {
            place
            for place, message in enumerate(messages)
            if place < first_trained or message.get(TURN_MASK_KEY, 1) == 0
        }
        render = self._renderer(tools)
        clean = suited(clean, lambda some: render(some, False))
        if _GENERATION_TAG.search(self._tokenizer.get_chat_template(None, tools)):
            return self._encode_marked(clean, tools, left_out).cut(max_length)
        finder = TurnFinder(render, clean, self._special)
        text, turns = finder.text, finder.find()
        if self._end_of_turn and turns and not turns[-1].closed:
            text, last = text + self._end_of_turn, turns.pop()
            turns.append(Turn(message=last.message, start=last.start, end=len(text), closed=True))
        tokens, spans = self._tokenize(text)
        trained = [turn for turn in turns if turn.message not in left_out]
        return EncodedChat(tokens=tokens, loss_mask=_mask(spans, trained)).cut(max_length)

    def response(self, encoded: EncodedChat) -> str:
        """What follows the prompt, as text."""
        return str(self._tokenizer.decode(encoded.tokens[encoded.prompt_length :], skip_special_tokens=False))

    def _encode_marked(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, left_out: set[int]
    ) -> EncodedChat:
        encoded = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if any(message["role"] == "assistant" for place, message in enumerate(messages) if place in left_out):
            finder = TurnFinder(self._renderer(tools), messages, self._special)
            turns = [turn for turn in finder.find() if turn.message in left_out]
            hidden = _mask(self._tokenize(finder.text)[1], turns)
            mask = [kept * (1 - hide) for kept, hide in zip(mask, hidden, strict=True)]
        return EncodedChat(tokens=tokens, loss_mask=mask)

    def _renderer(self, tools: list[dict[str, Any]] | None) -> Render:
        def render(messages: list[Message], generate: bool) -> str:
            return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=generate))

        return render

    def _apply(self, messages: list[Message], tools: list[dict[str, Any]] | None, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **how, **self._kwargs)
        except Exception as error:  # a template is a program of the model's; it raises what it likes
            raise DataError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from error

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters of each. Spaces that offsets leave out belong to the token behind them."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans: list[tuple[int, int]] = []
        done = 0
        for start, end in encoded["offset_mapping"]:
            # Tokens of one character's bytes all have its place.
            spans.append((min(start, done), max(end, start)))
            done = max(done, end)
        return list(encoded["input_ids"]), spans


def _mask(spans: list[tuple[int, int]], turns: list[Turn]) -> list[int]:
    """1 for each token that lies wholly in a turn. Both are in the text's order."""
    mask, left = [], list(reversed(turns))
    for start, end in spans:
        while left and left[-1].end <= start:
            left.pop()
        mask.append(int(bool(left) and left[-1].start <= start and end <= left[-1].end))
    return mask
