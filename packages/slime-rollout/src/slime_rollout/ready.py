"""`ReadyRollout`: a rollout that can be trained on, as the loop sees it: numbers and references, no tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.schedule import beyond_whole_steps
from slime_core.sums import sample_sums
from slime_core.types import Message, RolloutBatch, RolloutColumns, Sample, Span, Status, TrainShard
from slime_core.types.arrays import STATUSES, json_rows, numbers, ragged
from slime_rollout.errors import REWARD_FAILURE

EXAMPLES = 3
ANSWER_CHARACTERS = 60  # of an answer in a conversation, by which it is found in what is trained on
EMPTY, MASKED, NO_ADVANTAGE = "no response", "loss mask 0", "advantage 0"
REMOVED, NO_STEP = "left out by a function or a filter", "more than fill a step"
"""Why a sample is not trained on."""
Example = dict[str, Any]
"""A sample for people to read: the texts of its ``prompt`` and ``response``, its ``reward``, maybe its ``set``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadyRollout:
    """A rollout that can be trained on: all that the loop needs of it, and where its shards are."""

    rollout_id: int
    weight_version: int | None  # of the weights that it is to be trained from; `None` if unknown
    metrics: dict[str, float]  # for tracking
    seconds: dict[str, float]  # wall time per phase
    num_samples: int
    failures: list[str]  # why samples could not be scored, a reason for each of them
    examples: list[Example]  # its first samples, for people to read
    shards: list[Any]  # references to the shards, by data-parallel rank
    untrained: dict[str, int] = dataclasses.field(default_factory=dict)  # samples that are not trained on, by reason
    spans: list[Span] = dataclasses.field(default_factory=list)  # when it was generated, scored and split
    # `slime_core.sums.sample_sums`, and each sample's number as `index`; `shard_sum` of each data-parallel rank
    sample_sums: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    shard_sums: list[int] = dataclasses.field(default_factory=list)


def summary(columns: RolloutColumns, batch: RolloutBatch, *, of_data: bool) -> ReadyRollout:
    """The loop's part of a rollout, without references yet; ``batch`` is the same rollout."""
    return ReadyRollout(
        rollout_id=columns.rollout_id,
        weight_version=columns.weight_version,
        metrics=columns.metrics,
        seconds=columns.seconds,
        num_samples=sum(columns.group_sizes),
        failures=reward_failures(columns),
        examples=examples(batch.samples, of_data=of_data),
        shards=[],
        sample_sums=sample_sums(columns.samples) | {"index": np.asarray(columns.samples["index"])},
    )


def examples(samples: Sequence[Sample], *, of_data: bool = False, most: int = EXAMPLES) -> list[Example]:
    """The first sample of each of the first ``most`` groups; rows ``of_data`` have no reward."""
    first: dict[int, Sample] = {}
    for sample in samples:
        if len(first) < most:
            first.setdefault(sample.group_index, sample)
    return [
        {
            "prompt": one.prompt if isinstance(one.prompt, str) else _question(one.prompt or [], one.response),
            "response": one.response,
            "reward": None if of_data else one.reward,
        }
        for one in first.values()
    ]


def _question(messages: Sequence[Message], response: str) -> str:
    """The last message before the response that is not an answer.

    A conversation to train on holds its answers; the first of them that is in the response is where that begins.
    """
    answers = [
        place
        for place, message in enumerate(messages)
        if message.get("role") == "assistant" and (text := str(message.get("content") or "").strip())
        if text[:ANSWER_CHARACTERS] in response
    ]
    before = messages[: answers[0]] if answers else messages
    asked = [message for message in before if message.get("role") != "assistant"] or before or messages
    return str(asked[-1].get("content", "")) if asked else ""


def untrained(columns: RolloutColumns, shards: Sequence[TrainShard], batch_size: int) -> dict[str, int]:
    """How many samples of a rollout none of its shards has, by reason."""
    samples, found = columns.samples, Counter[str]()
    trained = {int(index) for shard in shards for index in numbers(shard.columns, "index")}
    rest, masks = set(beyond_whole_steps(columns, batch_size)), ragged(samples, "loss_mask").rows
    rows = [numbers(samples, name) for name in ("index", "response_length", "status", "remove_sample")]
    for at, (index, length, status, removed, mask) in enumerate(zip(*rows, masks, strict=True)):
        if index in trained:
            continue
        if at in rest:
            found[NO_STEP] += 1
        elif not length:
            found[EMPTY] += 1
        elif removed or STATUSES[status] in (Status.ABORTED, Status.FAILED):
            found[REMOVED] += 1
        else:
            found[NO_ADVANTAGE if mask is None or np.any(mask) else MASKED] += 1
    return dict(found)


def reward_failures(columns: RolloutColumns) -> list[str]:
    """Why samples could not be scored, a reason for each of them."""
    metadata = json_rows(columns.samples, "metadata", containing=REWARD_FAILURE)
    return [str(values[REWARD_FAILURE]) for values in metadata if REWARD_FAILURE in values]
