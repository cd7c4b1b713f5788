"""Lay samples of different lengths out as one row of tokens, computing a shared prompt once.

Notation: T packed tokens, N response tokens that are trained on, G rows of an attention block, Q queries and K keys
of a row.

The last token of a response predicts nothing, so it is never an input. A token is trained on through the hidden
state of the token before it; for the first response token that is the last prompt token.

Without sharing, a sample with P prompt and R response tokens is a segment of P + R − 1 tokens with causal
attention. With sharing, samples of one group with equal prompts become [prompt, response₁, …, responseₙ]: the
prompt attends to itself, response i to the prompt and to itself, and its positions continue after the prompt. The
network sees exactly what it sees without sharing, so log-probs are the same and the prompt's gradient is the sum
over its samples: only the work is less.

Here alone the trainer reads :class:`TrainShard` and :class:`TrainSample`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slime_core.errors import DataError
from slime_core.types import TrainSample, TrainShard


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of equally many (padded) queries and keys, which one attention call handles.

    Attributes:
        query_rows_GQ: Which packed token each query is. Padding repeats token 0.
        key_rows_GK: Which packed token each key is. Padding repeats token 0.
        mask_G1QK: True where a query sees a key; ``None`` when the keys are the queries and the mask is causal.
            A padded query sees the first key, because a row of a softmax must not be empty.
    """

    query_rows_GQ: torch.Tensor
    key_rows_GK: torch.Tensor
    mask_G1QK: torch.Tensor | None


@dataclass(frozen=True)
class AttentionLayout:
    """Who attends to whom in a packed row.

    Attributes:
        blocks: Attention calls. Every packed token is a query of exactly one of them.
        output_rows_T: Where token t's output is, in the blocks' flattened queries one after the other.
    """

    blocks: tuple[AttentionBlock, ...]
    output_rows_T: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch, ready for the model.

    Attributes:
        tokens_T: Input token ids.
        positions_T: Position of each token in its own sample, from 0.
        attention: Who attends to whom.
        logit_rows_N: Packed token whose hidden state predicts target n.
        targets_N: Trained response tokens, sample by sample.
        computed_tokens: T without the padding that sequence parallelism asks for.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionLayout
    logit_rows_N: torch.Tensor
    targets_N: torch.Tensor
    computed_tokens: int


class MicroBatch:
    """Samples that one forward pass computes. It is packed when it is due: a packed batch may hold large masks.

    Without samples it is a filler: one token is computed and nothing trained. It keeps a rank in step with others that
    have more micro-batches. T is padded to a multiple of ``multiple_of``, the tensor-parallel size under sequence
    parallelism.

    Attributes:
        samples: The samples in packed order.
        target_lengths: Number of targets of each of them.

    Raises:
        DataError: A sample has no prompt token or no response token.
    """

    def __init__(self, samples: Sequence[TrainSample], *, share_prompts: bool, multiple_of: int = 1) -> None:
        self._shared = _share(samples, share_prompts)
        self._multiple_of = multiple_of
        self.samples = tuple(sample for shared in self._shared for sample in shared)
        self.target_lengths = tuple(int(np.count_nonzero(sample.loss_mask)) for sample in self.samples)

    def values(self, name: str) -> torch.Tensor | None:
        """The samples' ``rollout_log_probs`` or ``teacher_log_probs`` at the targets [N]; ``None`` if one has none."""
        return target_values(self.samples, name)

    def per_sample(self, values_N: torch.Tensor) -> list[NDArray[np.float32]]:
        """Spread N values over the samples' response tokens; 0 where the mask is 0."""
        parts = torch.split(values_N.float().cpu(), list(self.target_lengths))
        spread = [np.zeros(sample.response_length, np.float32) for sample in self.samples]
        for row, sample, part in zip(spread, self.samples, parts, strict=True):
            row[_mask(sample)] = part.numpy()
        return spread

    def pack(self, device: torch.device | None = None) -> PackedBatch:
        """Lay the samples out as one row of tokens on the device; on the CPU unless given."""
        tokens, positions, rows, targets = [_NOTHING], [_NOTHING], [_NOTHING], [_NOTHING]
        own: list[_Segment] = []
        continued: list[_Segment] = []
        start = 0
        for shared in self._shared:
            prompt = range(start, start + shared[0].prompt_length)
            tokens.append(shared[0].tokens[: len(prompt)])
            positions.append(np.arange(len(prompt)))
            start = prompt.stop
            for sample in shared:
                response = range(start, start + sample.response_length - 1)
                response_tokens, mask = sample.tokens[len(prompt) :], _mask(sample)
                tokens.append(response_tokens[:-1])
                positions.append(np.arange(len(prompt), len(sample.tokens) - 1))
                rows.append(np.concatenate([[prompt[-1]], np.arange(response.start, response.stop)])[mask])
                targets.append(response_tokens[mask])
                start = response.stop
                if len(shared) > 1 and response:
                    continued.append(_Segment(prompt, response))
            own.append(_Segment(range(0), prompt if len(shared) > 1 else range(prompt.start, start)))
        if not own:
            own, start = [_Segment(range(0), range(1))], 1
        length = start + -start % self._multiple_of
        return PackedBatch(
            tokens_T=_joined(tokens, length).to(device),
            positions_T=_joined(positions, length).to(device),
            attention=_layout([own, continued], length, device),
            logit_rows_N=_joined(rows).to(device),
            targets_N=_joined(targets).to(device),
            computed_tokens=start,
        )


def trained_samples(shard: TrainShard) -> list[TrainSample]:
    """The samples that have a token to train on."""
    return [sample for sample in shard.samples if sample.loss_mask.any()]


def step_samples(shard: TrainShard, kept: Collection[int]) -> list[list[list[TrainSample]]]:
    """By step and micro-batch, the samples whose ``id()`` is in ``kept``; micro-batches without any are left out."""
    steps = []
    for step in shard.steps:
        chosen = [[shard.samples[position] for position in positions] for positions in step.micro_batches]
        chosen = [[sample for sample in samples if id(sample) in kept] for samples in chosen]
        steps.append([samples for samples in chosen if samples])
    return steps


def target_values(samples: Sequence[TrainSample], name: str) -> torch.Tensor | None:
    """An attribute with a number per response token, at the trained tokens [N]; ``None`` if a sample has none."""
    parts = [np.zeros(0, np.float32)]
    for sample in samples:
        values = getattr(sample, name)
        if values is None:
            return None
        parts.append(values[_mask(sample)])
    return torch.from_numpy(np.concatenate(parts))


@dataclass
class _Segment:
    """Tokens that attend to ``prefix`` (rows of the packed batch) and causally to themselves."""

    prefix: range
    rows: range


_NOTHING = np.zeros(0, np.int64)


def _mask(sample: TrainSample) -> NDArray[np.bool_]:
    return sample.loss_mask.astype(bool)


def _joined(parts: Sequence[NDArray[np.int64]], length: int = 0) -> torch.Tensor:
    """The parts as one tensor, filled up with zeros to ``length``."""
    joined = np.concatenate(parts)
    return torch.from_numpy(np.pad(joined, (0, max(length - len(joined), 0))))


def _share(samples: Sequence[TrainSample], share_prompts: bool) -> list[list[TrainSample]]:
    """Samples that are laid out behind one prompt."""
    shared: dict[object, list[TrainSample]] = {}
    for number, sample in enumerate(samples):
        if sample.prompt_length < 1 or sample.response_length < 1:
            raise DataError(
                f"sample {sample.index} has {sample.prompt_length} prompt and {sample.response_length} response "
                "tokens; training needs at least one of each"
            )
        key = (sample.group_index, sample.tokens[: sample.prompt_length].tobytes()) if share_prompts else number
        shared.setdefault(key, []).append(sample)
    return list(shared.values())


def _layout(kinds: list[list[_Segment]], num_tokens: int, device: torch.device | None) -> AttentionLayout:
    """One attention block per kind of segment; tokens in no segment (padding) get the output of token 0."""
    blocks: list[AttentionBlock] = []
    output_rows_T = torch.zeros(num_tokens, dtype=torch.long)
    offset = 0
    for segments in kinds:
        if not segments:
            continue
        block = _block(segments, device)
        width = block.query_rows_GQ.shape[1]
        for number, segment in enumerate(segments):
            place = offset + number * width
            output_rows_T[segment.rows.start : segment.rows.stop] = torch.arange(place, place + len(segment.rows))
        offset += block.query_rows_GQ.numel()
        blocks.append(block)
    return AttentionLayout(tuple(blocks), output_rows_T.to(device))


def _block(segments: list[_Segment], device: torch.device | None) -> AttentionBlock:
    queries = max(len(segment.rows) for segment in segments)
    query_rows_GQ = _padded([[segment.rows] for segment in segments]).to(device)
    if not any(segment.prefix for segment in segments):
        return AttentionBlock(query_rows_GQ, query_rows_GQ, None)
    key_rows_GK = _padded([[segment.prefix, segment.rows] for segment in segments]).to(device)
    # Query q of a row sees the prefix and the row's own first q + 1 tokens; a padded one, q ≥ length, key 0 only.
    prefix_G11 = torch.tensor([len(segment.prefix) for segment in segments], device=device)[:, None, None]
    length_G11 = torch.tensor([len(segment.rows) for segment in segments], device=device)[:, None, None]
    query_1Q1 = torch.arange(queries, device=device)[None, :, None]
    last_GQ1 = torch.where(query_1Q1 < length_G11, prefix_G11 + query_1Q1, 0)
    mask_GQK = torch.arange(key_rows_GK.shape[1], device=device)[None, None, :] <= last_GQ1
    return AttentionBlock(query_rows_GQ, key_rows_GK, mask_GQK[:, None])


def _padded(rows: list[list[range]]) -> torch.Tensor:
    """The ranges of each row one after the other; rows are filled up with zeros to the longest."""
    padded = torch.zeros(len(rows), max(sum(map(len, row)) for row in rows), dtype=torch.long)
    for number, row in enumerate(rows):
        end = 0
        for part in row:
            padded[number, end : end + len(part)] = torch.arange(part.start, part.stop)
            end += len(part)
    return padded
