"""Shards for losses on preference pairs: pairs in order; for a reward model, one score per response.

A pair is the two samples of a group; the preferred one has the larger raw reward. Its difference of rewards may be held
against the extra ``margin`` of the preferred sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slime_core.errors import DataError
from slime_core.types import TrainSample, TrainShard


def paired(shard: TrainShard) -> TrainShard:
    """The shard with each micro-batch's samples as chosen, rejected, chosen, rejected, …

    Raises:
        DataError: A sample has no partner in its micro-batch, neither of the two is preferred, or one has no token to
            train on.
    """
    in_order = [[_in_pairs(shard.samples, positions) for positions in step.micro_batches] for step in shard.steps]
    steps = zip(shard.steps, in_order, strict=True)
    return dataclasses.replace(shard, steps=[dataclasses.replace(step, micro_batches=own) for step, own in steps])


def _in_pairs(samples: Sequence[TrainSample], positions: Sequence[int]) -> list[int]:
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(samples[position].group_index, []).append(position)
    for number, members in groups.items():
        members.sort(key=lambda position: -samples[position].raw_reward)
        rewards = {samples[position].raw_reward for position in members}
        if len(members) != 2 or len(rewards) != 2:
            raise DataError(
                f"group {number} has {len(members)} samples in its micro-batch, of rewards {sorted(rewards)}; this "
                "loss needs preference pairs: two samples with different rewards in each group, split by "
                "ShardSpec(pairs=True)"
            )
        if untrained := [samples[position].index for position in members if not samples[position].loss_mask.any()]:
            raise DataError(f"sample {untrained[0]} of a preference pair has no token to train on; leave the pair out")
    return [position for members in groups.values() for position in members]


def scored(shard: TrainShard) -> TrainShard:
    """The shard with one place per response to compute a number at: the state behind its last trained token.

    A packed row computes a trained token from the token before it. So each response is cut behind its last trained
    token, and one more token, which is never looked at, is the only one that is trained on.
    """
    samples = [_scored(sample) if sample.loss_mask.any() else sample for sample in shard.samples]
    return TrainShard.of(rollout_id=shard.rollout_id, temperature=shard.temperature, samples=samples, steps=shard.steps)


def _scored(sample: TrainSample) -> TrainSample:
    length = int(np.flatnonzero(sample.loss_mask)[-1]) + 1
    mask = np.zeros(length + 1, np.uint8)
    mask[-1] = 1
    tokens = np.append(sample.tokens[: sample.prompt_length + length], np.int32(0))
    return dataclasses.replace(
        sample,
        tokens=tokens,
        response_length=length + 1,
        loss_mask=mask,
        trajectory_tokens=1,
        rollout_log_probs=None,
        teacher_log_probs=None,
    )


def score_row(sample: TrainSample, values: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """A score at the response's last trained token, from the numbers of the sample as :func:`scored` has it."""
    row = np.zeros(sample.response_length, np.float32)
    if values is not None:
        row[len(values) - 2] = values[-1]
    return row


def margins(samples: Sequence[TrainSample]) -> torch.Tensor:
    """By how much the chosen one of each pair should lead [P]; 0 where nothing is said."""
    return torch.tensor([float(sample.extras.get("margin") or 0.0) for sample in samples[::2]])
