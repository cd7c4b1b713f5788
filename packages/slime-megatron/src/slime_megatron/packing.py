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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slime_core.errors import DataError
from slime_core.types import TrainSample


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

    def to(self, device: torch.device) -> AttentionBlock:
        """The same block on ``device``."""
        mask = None if self.mask_G1QK is None else self.mask_G1QK.to(device)
        return AttentionBlock(self.query_rows_GQ.to(device), self.key_rows_GK.to(device), mask)


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
        samples: The samples, in the order of ``target_lengths``.
        tokens_T: Input token ids.
        positions_T: Position of each token in its own sample, from 0.
        attention: Who attends to whom.
        logit_rows_N: Packed token whose hidden state predicts target n.
        targets_N: Trained response tokens, sample by sample.
        target_lengths: Number of targets of each sample.
        computed_tokens: T without the padding that sequence parallelism asks for.
    """

    samples: tuple[TrainSample, ...]
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionLayout
    logit_rows_N: torch.Tensor
    targets_N: torch.Tensor
    target_lengths: tuple[int, ...]
    computed_tokens: int

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on ``device``."""
        blocks = tuple(block.to(device) for block in self.attention.blocks)
        return PackedBatch(
            self.samples,
            self.tokens_T.to(device),
            self.positions_T.to(device),
            AttentionLayout(blocks, self.attention.output_rows_T.to(device)),
            self.logit_rows_N.to(device),
            self.targets_N.to(device),
            self.target_lengths,
            self.computed_tokens,
        )

    def trained(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        """The entries of per-response-token ``values`` (one list per sample) that belong to targets, as fp32 of
        shape N."""
        picked = trained_values(self.samples, values)
        return torch.tensor(picked, dtype=torch.float32, device=self.targets_N.device)

    def per_sample(self, values_N: torch.Tensor) -> list[list[float]]:
        """Spread N values over the samples' response tokens; 0 where the mask is 0."""
        rest = iter(values_N.tolist())
        return [[next(rest) if kept else 0.0 for kept in sample.loss_mask] for sample in self.samples]


def trained_values(samples: Sequence[TrainSample], values: Sequence[Sequence[float]]) -> list[float]:
    """Those of the samples' per-response-token ``values`` that belong to trained tokens, one sample after the other."""
    return [
        value
        for sample, row in zip(samples, values, strict=True)
        for value, kept in zip(row, sample.loss_mask, strict=True)
        if kept
    ]


@dataclass
class _Segment:
    """Tokens that attend to ``prefix`` (rows of the packed batch) and causally to themselves."""

    prefix: range
    rows: range


def pack(samples: Sequence[TrainSample], *, share_prompts: bool, multiple_of: int = 1) -> PackedBatch:
    """Lay out one micro-batch.

    Args:
        samples: The samples; at least one.
        share_prompts: Compute equal prompts of a group once.
        multiple_of: T is padded to a multiple of this (the tensor-parallel size under sequence parallelism).

    Raises:
        DataError: There is no sample, or a sample has no prompt token or no response token.
    """
    if not samples:
        raise DataError("an empty micro-batch cannot be packed")
    tokens: list[int] = []
    positions: list[int] = []
    own: list[_Segment] = []
    continued: list[_Segment] = []
    ordered: list[TrainSample] = []
    rows: list[int] = []
    for shared in _share(samples, share_prompts):
        prompt_length = shared[0].prompt_length
        joined = len(shared) > 1
        start = len(tokens)
        prompt = range(start, start + prompt_length)
        tokens += shared[0].tokens[:prompt_length]
        for sample in shared:
            first = len(tokens)
            tokens += sample.tokens[prompt_length:-1]
            response = range(first, len(tokens))
            if joined and response:
                continued.append(_Segment(prompt, response))
            rows += _logit_rows(sample, prompt, response)
        own.append(_Segment(range(0), prompt if joined else range(start, len(tokens))))
        positions += range(prompt_length)
        for sample in shared:
            positions += range(prompt_length, len(sample.tokens) - 1)
        ordered += shared
    computed = len(tokens)
    padding = -computed % multiple_of
    tokens += [0] * padding
    positions += [0] * padding
    targets = [_trained_tokens(sample) for sample in ordered]
    return PackedBatch(
        samples=tuple(ordered),
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor(positions),
        attention=_layout([own, continued], len(tokens)),
        logit_rows_N=torch.tensor(rows, dtype=torch.long),
        targets_N=torch.tensor([token for row in targets for token in row], dtype=torch.long),
        target_lengths=tuple(map(len, targets)),
        computed_tokens=computed,
    )


def _share(samples: Iterable[TrainSample], share_prompts: bool) -> list[list[TrainSample]]:
    """Samples that are laid out behind one prompt."""
    shared: dict[object, list[TrainSample]] = {}
    for number, sample in enumerate(samples):
        if sample.prompt_length < 1 or sample.response_length < 1:
            raise DataError(
                f"sample {sample.index} has {sample.prompt_length} prompt and {sample.response_length} response "
                "tokens; training needs at least one of each"
            )
        prompt = tuple(sample.tokens[: sample.prompt_length])
        key = (sample.group_index, prompt) if share_prompts else number
        shared.setdefault(key, []).append(sample)
    return list(shared.values())


def _trained_tokens(sample: TrainSample) -> list[int]:
    response = sample.tokens[sample.prompt_length :]
    return [token for token, kept in zip(response, sample.loss_mask, strict=True) if kept]


def _logit_rows(sample: TrainSample, prompt: range, response: range) -> list[int]:
    predicting = [prompt[-1], *response]
    return [row for row, kept in zip(predicting, sample.loss_mask, strict=True) if kept]


def _layout(kinds: list[list[_Segment]], num_tokens: int) -> AttentionLayout:
    """One attention block per kind of segment; tokens in no segment (padding) get the output of token 0."""
    blocks: list[AttentionBlock] = []
    output_rows_T = torch.zeros(num_tokens, dtype=torch.long)
    offset = 0
    for segments in kinds:
        if not segments:
            continue
        block = _block(segments)
        width = block.query_rows_GQ.shape[1]
        for number, segment in enumerate(segments):
            place = offset + number * width
            output_rows_T[segment.rows.start : segment.rows.stop] = torch.arange(place, place + len(segment.rows))
        offset += block.query_rows_GQ.numel()
        blocks.append(block)
    return AttentionLayout(tuple(blocks), output_rows_T)


def _block(segments: list[_Segment]) -> AttentionBlock:
    queries = max(len(segment.rows) for segment in segments)
    query_rows_GQ = _padded([list(segment.rows) for segment in segments])
    if not any(segment.prefix for segment in segments):
        return AttentionBlock(query_rows_GQ, query_rows_GQ, None)
    key_rows_GK = _padded([[*segment.prefix, *segment.rows] for segment in segments])
    # Query q of a row sees the prefix and the row's own first q + 1 tokens; a padded one, q ≥ length, key 0 only.
    prefix_G11 = torch.tensor([len(segment.prefix) for segment in segments])[:, None, None]
    length_G11 = torch.tensor([len(segment.rows) for segment in segments])[:, None, None]
    query_1Q1 = torch.arange(queries)[None, :, None]
    last_GQ1 = torch.where(query_1Q1 < length_G11, prefix_G11 + query_1Q1, 0)
    mask_GQK = torch.arange(key_rows_GK.shape[1])[None, None, :] <= last_GQ1
    return AttentionBlock(query_rows_GQ, key_rows_GK, mask_GQK[:, None])


def _padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
