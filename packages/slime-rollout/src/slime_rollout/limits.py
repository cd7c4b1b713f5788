"""A model's limits, read from its config: token ids, and how many of them. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.files import read_json
from slime_core.former_names import former_attribute

RESERVED = 7
"""Tokens of a context that SGLang 0.5.23 keeps free behind a prompt: it refuses one that leaves fewer."""
LEAST_LOG_PROB, LARGEST_LOG_PROB = -1e30, 1e-2
"""A log-prob (nats) is above the one, and the other at most: rounding may lift one above 0."""
_UNUSED = 2  # of those, what a response does not get either


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """The limits of a model; ``None`` for one that its config does not say."""

    vocab_size: int | None = None  # token ids are 0 or more, and below
    context: int | None = None  # most tokens of a prompt and its response

    @classmethod
    def of(cls, hf_checkpoint: str) -> ModelLimits:
        """Those that ``config.json`` of a Hugging Face directory says."""
        parts = _config_parts(hf_checkpoint)
        return cls(vocab_size=_number(parts, "vocab_size"), context=_number(parts, "max_position_embeddings"))

    def longest_prompt(self, max_context: int | None = None) -> int | None:
        """Tokens of the longest prompt that an engine answers; ``max_context`` is the user's own limit of both."""
        found = [] if self.context is None else [self.context - RESERVED]
        found += [] if max_context is None else [max_context - 1]
        return max(min(found), 0) if found else None

    room = former_attribute("room", "tokens_left")

    def tokens_left(self, length: int) -> int | None:
        """Tokens that an engine adds to so many at most, 0 where it refuses them; ``None`` if that is unknown."""
        if self.context is None:
            return None
        return self.context - _UNUSED - length if length <= self.context - RESERVED else 0

    def token_problem(self, tokens: Sequence[int], tokenizer: Any = None) -> str | None:
        """The first of the token ids that the model does not have, as a message with the tokenizer's text of it.

        Ids between the vocabulary and its padded size are none, too: nothing trained their rows.
        """
        if self.vocab_size is None or not len(tokens) or (max(tokens) < self.vocab_size and min(tokens) >= 0):
            return None
        token = next(token for token in tokens if not 0 <= token < self.vocab_size)
        return f"token {_named(token, tokenizer)} is outside the model's vocabulary of {self.vocab_size}; {_ADVICE}"

    def length_problem(self, length: int) -> str | None:
        """A message about a prompt and response of too many tokens together."""
        if self.context is None or length <= self.context:
            return None
        return f"{length} tokens with the prompt are more than the model's context of {self.context}"


_ADVICE = "give the tokenizer that the model was trained with, or resize the model's embeddings to it"


def _named(token: int, tokenizer: Any) -> str:
    """An id with its text, and whether the tokenizer adds it to its own vocabulary."""
    if tokenizer is None:
        return str(token)
    added = token in (getattr(tokenizer, "added_tokens_decoder", None) or {})
    text = tokenizer.convert_ids_to_tokens([token])[0] if token >= 0 else None
    return str(token) if text is None else f"{token} ({text!r}{', which the tokenizer adds' if added else ''})"


def tokens_beyond(limits: ModelLimits, tokenizer: Any) -> str | None:
    """A line about what the tokenizer can write and the model cannot read, if there is something."""
    size = limits.vocab_size
    known: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    if size is None or max([*known, tokenizer.vocab_size - 1]) < size:
        return None
    beyond = sorted(token for token in tokenizer.get_vocab().values() if token >= size)
    if not beyond:
        return None
    return (
        f"{len(beyond)} of the tokenizer's tokens, such as {_named(beyond[0], tokenizer)}, are outside the model's "
        f"vocabulary of {size}: text with them is refused"
    )


def stop_problem(text: str, tokenizer: Any) -> str | None:
    """Why a stop text can never end a response: no tokens of the tokenizer's are that text."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if text in tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return None
    return f"the stop text {text!r} ends no response: no tokens of the model's tokenizer are that text"


def _config_parts(hf_checkpoint: str) -> list[dict[str, Any]]:
    """The config of a model, and the part of it about text; none if it cannot be read."""
    try:
        config = read_json(Path(hf_checkpoint) / "config.json")
    except (OSError, ValueError, DataError):
        return []
    nested = config.get("text_config") if isinstance(config, dict) else None
    return [part for part in (config, nested) if isinstance(part, dict)]


def _number(parts: list[dict[str, Any]], name: str) -> int | None:
    found = (part.get(name) for part in parts)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def wrong_on_cpu(hf_checkpoint: str, longest: int | None = None) -> str | None:
    """The part of a model that SGLang's attention on a CPU leaves out, so that it answers as another one; or ``None``.

    A window as long as the ``longest`` prompt and response leaves nothing out.
    """
    parts = _config_parts(hf_checkpoint)
    if any(part.get("model_type") == "gpt_oss" for part in parts):
        return "attention sinks, which gpt-oss has in every layer"
    for part in parts:
        window = part.get("sliding_window")
        slides = part.get("use_sliding_window", True) and "sliding_attention" in part.get(
            "layer_types", ["sliding_attention"]
        )
        context = min(found for found in (longest, _number(parts, "max_position_embeddings"), 2**62) if found)
        if isinstance(window, int) and slides and window < context:
            return f"the window of {window} tokens that layers attend to, with up to {context} tokens in a context"
    return None
