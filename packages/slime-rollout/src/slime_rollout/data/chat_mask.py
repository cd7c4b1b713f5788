"""Conversations to token ids, with a mask of the tokens that the model writes.

The template's whole rendering is tokenized once, so the tokens are its own. A template that marks the assistant's
words with ``{% generation %}`` says itself which they are.

In other templates the assistant's turns are found without knowing the template, which is a program; but it can be
asked. A mark, a character that occurs nowhere, is put into a message's text, and the conversation is rendered again. If
taking the mark out gives the same rendering as before, it stood exactly where that place of the message is written, and
it disturbed nothing; otherwise another place is tried. From such a place on,

- the rendering of the messages before a turn, with the generation prompt, is what the model is given: the turn starts
  where that ends or, if the template writes past turns otherwise (DeepSeek-R1 and Qwen3 leave reasoning out), where the
  two part;
- the rendering that stops after the turn shows what closes it: the turn ends with the last special token in that
  (``<|im_end|>``, ``<|eot_id|>``, ``<｜end▁of▁sentence｜>``). Where nothing closes a turn (GLM), the special token that
  opens the next message does, as it does when the model generates.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.types import Message, Sample, Status
from slime_rollout.data.chat import Tools, apply_template, marked, suited, tokenized, unused_characters
from slime_rollout.data.messages import TURN_MASK_KEY

Render = Callable[[list[Message], bool], str]
"""Messages, and whether to add the generation prompt, to text. Raises DataError where the template refuses them."""

_Place = tuple[tuple[str | int, ...], int]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOTHING_ENDS_IT = "no special token ends it, so a model could not learn to stop"
_BOUNDARY = re.compile(r"[\s>\]:]")


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """A conversation as N token ids, with N numbers that are 1 where the token is the model's and trained on."""

    tokens: list[int]
    loss_mask: list[int]
    truncated: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one; N if none is trained."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.tokens)

    def sample(self, tokenizer: Any, **fields: Any) -> Sample:
        """The conversation as a sample, its response from the first trained token on, with further ``fields``."""
        start = self.prompt_length
        return Sample(
            tokens=list(self.tokens),
            response=str(tokenizer.decode(self.tokens[start:], skip_special_tokens=False)),
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

    Trained are the assistant's own words, from the end of the generation prompt on, and the token that ends the turn. A
    token that reaches over the start of a turn is not trained on.

    ``end_of_turn`` is a special token to write and train after the last turn where the template writes none: GLM ends a
    turn by the start of the next message, so ``<|user|>`` teaches the model to stop. Raises `ConfigError` if the
    tokenizer does not have it, has no chat template, or is not fast: only fast ones know where each token is.
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
            raise ConfigError(
                f"end_of_turn {end_of_turn!r} is not a special token of {name}; it has {sorted(specials)}"
            )
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._end_of_turn = end_of_turn
        alternatives = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
        self._special = re.compile(alternatives or r"(?!)")

    def encode(
        self, messages: Sequence[Message], *, tools: Tools = None, first_trained: int = 0, max_length: int | None = None
    ) -> EncodedChat:
        """Encode one conversation; what is longer than ``max_length`` tokens loses its end.

        The assistant's messages from number ``first_trained`` on are trained on, unless their ``step_loss_mask`` is 0.
        Raises `DataError` if the template refuses the messages, or does not show where a turn is.
        """
        clean = [{key: value for key, value in message.items() if key != TURN_MASK_KEY} for message in messages]
        left_out = {
            place
            for place, message in enumerate(messages)
            if place < first_trained or message.get(TURN_MASK_KEY, 1) == 0
        }
        render = self._renderer(tools)
        clean = suited(clean, lambda some: render(some, False))
        if _GENERATION_TAG.search(self.tokenizer.get_chat_template(None, tools)):
            return self._encode_marked(clean, tools, left_out).cut(max_length)
        finder = _TurnFinder(render, clean, self._special)
        text, turns = finder.text, finder.find()
        if self._end_of_turn and turns and not turns[-1].closed:
            text, last = text + self._end_of_turn, turns.pop()
            turns.append(_Turn(message=last.message, start=last.start, end=len(text), closed=True))
        tokens, spans = self._tokenize(text)
        trained = [turn for turn in turns if turn.message not in left_out]
        return EncodedChat(tokens=tokens, loss_mask=_mask(spans, trained)).cut(max_length)

    def _encode_marked(self, messages: list[Message], tools: Tools, left_out: set[int]) -> EncodedChat:
        encoded = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if any(message["role"] == "assistant" for place, message in enumerate(messages) if place in left_out):
            finder = _TurnFinder(self._renderer(tools), messages, self._special)
            turns = [turn for turn in finder.find() if turn.message in left_out]
            hidden = _mask(self._tokenize(finder.text)[1], turns)
            mask = [kept * (1 - hide) for kept, hide in zip(mask, hidden, strict=True)]
        return EncodedChat(tokens=tokens, loss_mask=mask)

    def _renderer(self, tools: Tools) -> Render:
        def render(messages: list[Message], generate: bool) -> str:
            return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=generate))

        return render

    def _apply(self, messages: list[Message], tools: Tools, **how: Any) -> Any:
        return apply_template(self.tokenizer, messages, tools, **how, **self._kwargs)

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters of each. Spaces that offsets leave out belong to the token behind them."""
        encoded = tokenized(self.tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
        spans: list[tuple[int, int]] = []
        done = 0
        for start, end in encoded["offset_mapping"]:
            # Tokens of one character's bytes all have its place.
            spans.append((min(start, done), max(end, start)))
            done = max(done, end)
        return list(encoded["input_ids"]), spans


def _mask(spans: list[tuple[int, int]], turns: list[_Turn]) -> list[int]:
    """1 for each token that lies wholly in a turn. Both are in the text's order."""
    mask, left = [], list(reversed(turns))
    for start, end in spans:
        while left and left[-1].end <= start:
            left.pop()
        mask.append(int(bool(left) and left[-1].start <= start and end <= left[-1].end))
    return mask


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """The model's words in message number ``message``: characters ``start`` to ``end`` of the rendering."""

    message: int
    start: int
    end: int
    closed: bool  # whether an end-of-turn token is part of it


class _TurnFinder:
    """Finds the assistant's turns of one conversation; ``special`` matches the tokenizer's special tokens."""

    def __init__(self, render: Render, messages: list[Message], special: re.Pattern[str]) -> None:
        self._render, self._messages, self._special = render, messages, special
        self._rendered = functools.cache(lambda count, generate=False: render(messages[:count], generate))
        self._position = functools.cache(self._mark_position)
        self.text = self._rendered(len(messages))
        self._mark = unused_characters(messages, self.text)[0]

    def find(self) -> list[_Turn]:
        """The turns, in order. Raises DataError where the template does not show where a turn starts or ends."""
        turns: list[_Turn] = []
        for number in (place for place, message in enumerate(self._messages) if message["role"] == "assistant"):
            if number == 0:
                raise DataError(
                    "message 1 is the assistant's; begin with a system or user message, so that it answers one"
                )
            start, (end, closed) = self._start(number), self._end(number)
            if not (turns[-1].end if turns else 0) <= start <= end:
                raise self._refusal(number, "the turns overlap")
            if closed and start == end:  # what ends it is an earlier message's
                raise self._refusal(number, _NOTHING_ENDS_IT)
            turns.append(_Turn(message=number, start=start, end=end, closed=closed))
        return turns

    def _start(self, number: int) -> int:
        prompt, before = self._rendered(number, generate=True), self._rendered(number)
        for earlier in reversed(range(number)):
            for place in _places(self._messages[earlier]):
                here = self._position(earlier, place, len(self._messages))
                there = self._position(earlier, place, number, generate=True)
                if here is None or there is None:
                    continue
                given = prompt[there:]
                shared = shared_length(given, self.text[here : here + len(given)])
                if shared == len(given):
                    return here + shared
                if not prompt.startswith(before) or shared < len(before) - there:
                    raise self._refusal(number, "what comes before it is written otherwise once the turn is there")
                # A shared beginning that breaks off inside a word or a tag reaches into the turn by chance.
                whole = max((match.end() for match in _BOUNDARY.finditer(given, 0, shared)), default=0)
                start = here + max(whole, len(before) - there)
                return min(start, *self._content_starts(number, start))
        raise self._refusal(number, "no message before it is written as it stands")

    def _content_starts(self, number: int, otherwise: int) -> list[int]:
        """Where texts of the message begin: what the model writes begins there or earlier."""
        found = [
            self._position(number, place, len(self._messages)) for place in _places(self._messages[number], first=True)
        ]
        return [position for position in found if position is not None] or [otherwise]

    def _end(self, number: int) -> tuple[int, bool]:
        until = self._rendered(number + 1)
        anchors = ((near, place) for near in range(number, -1, -1) for place in _places(self._messages[near]))
        for near, place in anchors:
            here = self._position(near, place, len(self._messages))
            there = self._position(near, place, number + 1)
            if here is None or there is None or not self.text.startswith(until[there:], here):
                continue
            closing = list(self._special.finditer(until, there))
            if self._closes(number):
                if not closing:
                    break
                return here + closing[-1].end() - there, True
            end = here + len(until) - there
            following = self._special.match(self.text, end)
            if following is None and end < len(self.text):
                raise self._refusal(number, _NOTHING_ENDS_IT)
            return (end, False) if following is None else (following.end(), True)
        raise self._refusal(number, "it is written otherwise once more messages follow")

    def _closes(self, number: int) -> bool:
        """Whether the template closes a turn itself: a special token comes after a plain answer."""
        answer = {"role": "assistant", "content": self._mark}
        text = self._render([*self._messages[:number], answer], False)
        if self._mark not in text:
            raise self._refusal(number, "a plain answer in its place is not written")
        return self._special.search(text, text.rindex(self._mark)) is not None

    def _mark_position(self, number: int, place: _Place, count: int, *, generate: bool = False) -> int | None:
        """Where a place of a message is in the rendering of the first ``count`` messages; None if that is not clear."""
        messages = self._messages[:count]
        messages[number] = marked(messages[number], *place, self._mark)
        try:
            text = self._render(messages, generate)
        except DataError:
            return None
        position = text.find(self._mark)
        unmarked = text[:position] + text[position + 1 :]
        return position if position >= 0 and unmarked == self._rendered(count, generate=generate) else None

    def _refusal(self, number: int, reason: str) -> DataError:
        return DataError(
            f"the chat template does not show where the assistant's turn in message {number + 1} is: {reason}; "
            "mark the turns in the template with {% generation %} and {% endgeneration %}"
        )


def _places(message: Message, *, first: bool = False) -> Iterator[_Place]:
    """Places in a message's texts to try a mark at, the likeliest first; the earliest of the message if ``first``."""
    calls = message.get("tool_calls") or []
    texts: list[tuple[tuple[str | int, ...], str]] = []
    for number in range(len(calls)) if first else reversed(range(len(calls))):
        call = calls[number]
        path = ("tool_calls", number, *(("function",) if "function" in call else ()), "name")
        texts.append((path, str(call.get("function", call).get("name") or "")))
    texts.append((("content",), message.get("content") or ""))
    if message.get("reasoning_content"):
        texts.append((("reasoning_content",), message["reasoning_content"]))
    for path, text in texts:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        after_reasoning = text.rfind("</think>") + len("</think>") if "</think>" in text else start
        inner = [max(end - 1, 0), len(text) // 2, len(text) // 4, 3 * len(text) // 4]
        order = [start, after_reasoning] if first else [end, after_reasoning, *inner, start]
        for offset in dict.fromkeys(order):
            yield path, offset


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common beginning."""
    both = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in both if one != other), min(len(first), len(second)))
