"""Notes on the data before a run: how rows of other projects are read, and what the chat template leaves out.

Rows are looked at in a few hundred places of each file, spread evenly, for two seconds at most.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.types import Message
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import apply_template, as_messages, template_tokenizer
from slime_rollout.data.files import PromptFile, RawRow
from slime_rollout.data.forms import Kind
from slime_rollout.data.left_out import EARLIER, WRITTEN, parts_left_out, rewrites_history
from slime_rollout.data.messages import TURN_MASK_KEY
from slime_rollout.data.offline import PreferenceFields, SftFields, last_turn, preference_row, sft_row
from slime_rollout.data.rows import FIRST_ROWS, Row, check_row
from slime_rollout.eval_sets import data_files

MOST_ROWS = 256
"""Rows of a file that are looked at."""
MOST_SECONDS = 2.0
"""For each file, to render them."""
_ALLOW = "--allow-left-out"


def data_notes(config: RolloutConfig, kind: Kind) -> list[str]:
    """Notes on the files that a run of checked data will read, a line each.

    Raises `DataError` if the chat template leaves out something to be trained on, without ``--allow-left-out``.
    """
    tokenizer = functools.cache(lambda: _chat_tokenizer(config))  # loaded when it is first needed
    found: list[str] = []
    for path, own, named in data_files(config):
        with named:
            found += _file_notes(path, own, kind, tokenizer)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class _Talk:
    """Messages as the template gets them at once, and the numbers of those that are trained on."""

    messages: list[Message]
    trained: frozenset[int] = frozenset()


@dataclass
class _Counts:
    """Of the rows that were looked at: how many show what."""

    rows: int = 0
    said: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    untrained: Counter[str] = field(default_factory=Counter)
    first: str = ""
    rewritten: int = 0
    answered: int = 0


def _chat_tokenizer(config: RolloutConfig) -> Any:
    """The model's tokenizer; ``None`` if there is none with a chat template, which a run says itself."""
    try:
        found = template_tokenizer(config.data.hf_checkpoint, trust_remote_code=config.data.trust_remote_code)
    except ConfigError:
        return None
    return found if found.chat_template else None


def _file_notes(path: str, config: RolloutConfig, kind: Kind, tokenizer: Callable[[], Any]) -> Iterator[str]:
    raws, total = _spread(path, streamed=kind == "prompts" and config.data.streaming_data)
    counts, until = _Counts(), float("inf")
    random.Random(0).shuffle(raws)  # what there is no time for is spread, too
    for raw in raws:
        if time.monotonic() > until:
            break
        try:
            row, talks = _TALKS[kind](raw, config)
        except DataError:  # counted, skipped or refused elsewhere
            continue
        counts.rows += 1
        counts.said[row.said] += 1
        counts.answered += kind == "prompts" and any(talk.messages[-1]["role"] == "assistant" for talk in talks)
        talks = [talk for talk in talks if row.tools or not _is_plain(talk.messages)]
        if talks and tokenizer() is not None:
            until = min(until, time.monotonic() + MOST_SECONDS)  # counted from when the tokenizer is there
            _count(counts, row, talks, _renderer(tokenizer(), config, generate=kind == "prompts"))
    yield from _lines(path, counts, total, allowed=config.data.allow_left_out)


def _count(counts: _Counts, row: Row, talks: Sequence[_Talk], render: Callable[..., str]) -> None:
    lost = [(one, talk) for talk in talks for one in parts_left_out(render, talk.messages, row.tools)]
    parts = list(dict.fromkeys(one.part for one, _ in lost))
    written = [one.part for one, talk in lost if one.part in WRITTEN and one.message in talk.trained]
    untrained = list(dict.fromkeys(written))
    counts.lost.update(parts)
    counts.untrained.update(untrained)
    counts.first = counts.first or (row.where if untrained else "")
    if EARLIER not in parts:  # which is the same, and said
        trained = [talk for talk in talks if len(talk.trained) > 1]
        counts.rewritten += any(rewrites_history(render, talk.messages, row.tools) for talk in trained)


def _lines(path: str, counts: _Counts, total: str, *, allowed: bool) -> Iterator[str]:
    of = f"{total} rows" if str(counts.rows) == total else f"the {counts.rows} rows of {total} that were looked at"
    for said, count in counts.said.items():
        if said:
            yield f"{path}: read as {said}" + ("" if count == counts.rows else f" ({count} of {of})")
    if counts.untrained and not allowed:
        raise DataError(
            f"{path}: the chat template leaves out what is to be trained on, of {of}: {_numbers(counts.untrained)}, "
            f"first {counts.first}; use a model whose template writes it, leave such turns out with "
            f'"{TURN_MASK_KEY}": 0, or train without it with {_ALLOW}'
        )
    if counts.lost:
        trained = f"; and is to be trained on: {_numbers(counts.untrained)}" if counts.untrained else ""
        yield f"{path}: the chat template leaves out, of {of}: {_numbers(counts.lost)}{trained}"
    if counts.rewritten:
        yield (
            f"{path}: the chat template writes earlier turns otherwise once more messages follow, in "
            f"{counts.rewritten} of {of}; they are trained on as the whole conversation has them"
        )
    if counts.answered:
        yield (
            f"{path}: {counts.answered} of {of} end with a message of the assistant's, and the model is asked to "
            "answer once more"
        )


def _numbers(counts: Counter[str]) -> str:
    return ", ".join(f"{part} (in {count})" for part, count in counts.most_common())


def _is_plain(messages: Sequence[Message]) -> bool:
    """Whether there is nothing that a template would leave out: a message of a user, and perhaps an answer."""
    return [message["role"] for message in messages] in (["user"], ["user", "assistant"]) and all(
        not (set(message) - {"role", "content", TURN_MASK_KEY}) and "</think>" not in (message["content"] or "")
        for message in messages
    )


def _renderer(tokenizer: Any, config: RolloutConfig, *, generate: bool) -> Callable[..., str]:
    how = {"tokenize": False, "add_generation_prompt": generate, **config.data.chat_template_kwargs}

    def render(messages: list[Message], tools: Any) -> str:
        clean = [{key: value for key, value in message.items() if key != TURN_MASK_KEY} for message in messages]
        return str(apply_template(tokenizer, clean, tools, **how))

    return render


def _of_prompt(raw: RawRow, config: RolloutConfig) -> tuple[Row, list[_Talk]]:
    row = check_row(raw, config)
    return row, [_Talk(messages=as_messages(row.prompt))] if config.data.apply_chat_template else []


def _of_conversation(raw: RawRow, config: RolloutConfig) -> tuple[Row, list[_Talk]]:
    row = sft_row(raw, SftFields.of(config))
    first = last_turn(row.messages) if config.data.loss_mask_type == "distill_qwen" else 0
    return row, [_Talk(messages=row.messages, trained=_trained(row.messages, first))]


def _of_pair(raw: RawRow, config: RolloutConfig) -> tuple[Row, list[_Talk]]:
    row = preference_row(raw, PreferenceFields.of(config))
    if isinstance(row.prompt, str):
        return row, []
    whole: list[list[Message]] = [[*row.prompt, *side] for side in (row.chosen, row.rejected) if isinstance(side, list)]
    return row, [_Talk(messages=one, trained=_trained(one, len(row.prompt))) for one in whole]


def _trained(messages: Sequence[Message], first: int) -> frozenset[int]:
    return frozenset(
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == "assistant" and message.get(TURN_MASK_KEY, 1)
    )


_TALKS: dict[Kind, Callable[[RawRow, RolloutConfig], tuple[Row, list[_Talk]]]] = {
    "prompts": _of_prompt,
    "conversations": _of_conversation,
    "pairs": _of_pair,
}


def _spread(path: str, *, streamed: bool) -> tuple[list[RawRow], str]:
    """Some rows of a file, as far from each other, and how many there are; of a stream the first."""
    rows: Iterable[RawRow] = (raw for _, raw in PromptFile(path, streamed=streamed).rows())
    if streamed:
        return list(islice(rows, FIRST_ROWS)), "a stream"
    kept: list[RawRow] = []
    step, number = 1, -1
    for number, raw in enumerate(rows):
        if number % step == 0:
            kept.append(raw)
        if len(kept) == 2 * MOST_ROWS:
            kept, step = kept[::2], 2 * step
    return kept[:: -(-len(kept) // MOST_ROWS)], str(number + 1)
