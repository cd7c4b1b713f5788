"""Lay samples of different lengths out as one row of tokens, computing a shared prompt once.

Notation: T packed tokens of this rank, N response tokens that are trained on, M of them that this rank computes.

The last token of a response predicts nothing, so it is never an input. A token is trained on through the hidden
state of the token before it; for the first response token that is the last prompt token.

Without sharing, a sample with P prompt and R response tokens is a segment of P + R − 1 tokens with causal
attention. With sharing, samples of one group with equal prompts become [prompt, response₁, …, responseₙ]: the
prompt attends to itself, response i to the prompt and to itself, and its positions continue after the prompt. The
network sees exactly what it sees without sharing, so log-probs are the same and the prompt's gradient is the sum
over its samples: only the work is less. Where prompts of different groups begin alike (a system prompt, worked
examples), that beginning comes first in the row and is computed once, too: [beginning, rest of prompt₁, its responses,
rest of prompt₂, …], where all that follows also attends to the beginning.

Over context-parallel ranks, each sample is padded and cut in zig-zag. Keys and values are gathered from all ranks, so a
chunk of queries attends to keys of all of them; prompts are not shared.

Here and in ``pairs.py`` alone the trainer reads :class:`TrainShard` and :class:`TrainSample`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slime_core.errors import DataError
from slime_core.types import TrainSample, TrainShard
from slime_core.types.train import KEPT_COUNTS, KEPT_IDS, ROUTED_EXPERTS
from slime_megatron.model.attention import AttentionLayout, Continuation, layout
from slime_megatron.model.routing import Routing


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch, ready for the model.

    Attributes:
        tokens_T: Input token ids.
        positions_T: Position of each token in its own sample, from 0.
        padding_T: Which tokens are of no sample.
        attention: Who attends to whom.
        logit_rows_M: Packed token whose hidden state predicts each target of this rank.
        targets_M: The targets themselves: trained response tokens, sample by sample.
        places_M: Which of the N targets they are; ``None`` where this rank has all of them.
        num_targets: N.
        routing: Which experts the tokens are to go to; ``None`` where that is left to the routers.
        kept: The tokens that each of the M targets was sampled from; ``None``: the whole vocabulary.
        computed_tokens: T without padding.
        computed_pairs: Pairs of such a token and one that it sees, or itself.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    padding_T: torch.Tensor
    attention: AttentionLayout
    logit_rows_M: torch.Tensor
    targets_M: torch.Tensor
    places_M: torch.Tensor | None
    num_targets: int
    computed_tokens: int
    computed_pairs: int
    kept: KeptTokens | None = None
    routing: Routing | None = None


@dataclass(frozen=True)
class KeptTokens:
    """Token ids, each target's after those of the one before, and how many each has."""

    ids: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class ContextParallel:
    """This rank's place among those that share a sequence."""

    rank: int = 0
    size: int = 1


class MicroBatch:
    """Samples that one forward pass computes. It is packed when it is due.

    Without samples it is a filler: a few tokens are computed and nothing trained. It keeps a rank in step with others
    that have more micro-batches. T is padded to a multiple of ``multiple_of``, the tensor-parallel size under sequence
    parallelism.

    ``share_prompts`` is the flag's value: ``auto`` shares where that saves a tenth of the tokens. With ``on``, too, the
    beginning of different prompts is only shared where it does: all tokens then attend in one more call.

    Attributes:
        samples: The samples in packed order.
        positions: Their positions in the shard; without ``positions`` those among the samples given.
        target_lengths: Number of targets of each of them.

    Raises:
        DataError: A sample has no prompt token or no response token.
    """

    def __init__(
        self,
        samples: Sequence[TrainSample],
        positions: Sequence[int] | None = None,
        *,
        share_prompts: str = "auto",
        multiple_of: int = 1,
        context: ContextParallel | None = None,
    ) -> None:
        self._context = context or ContextParallel()
        groups, self._beginning = _share(samples, share_prompts if self._context.size == 1 else "off")
        self._shared = [[samples[place] for place in group] for group in groups]
        self._multiple_of = multiple_of
        self._recorded: dict[int, torch.Tensor] = {}
        self.samples = tuple(sample for shared in self._shared for sample in shared)
        given = range(len(samples)) if positions is None else positions
        self.positions = tuple(given[place] for group in groups for place in group)
        self.target_lengths = tuple(int(np.count_nonzero(sample.loss_mask)) for sample in self.samples)

    def per_sample(self, values_N: torch.Tensor) -> list[NDArray[np.float32]]:
        """Spread N values over the samples' response tokens; 0 where the mask is 0."""
        parts = torch.split(values_N.float().cpu(), list(self.target_lengths))
        spread = [np.zeros(sample.response_length, np.float32) for sample in self.samples]
        for row, sample, part in zip(spread, self.samples, parts, strict=True):
            row[_mask(sample)] = part.numpy()
        return spread

    def pack(self, device: torch.device | None = None, *, replays: bool = False, records: bool = False) -> PackedBatch:
        """Lay the samples out as one row of tokens on the device; on the CPU unless given.

        With ``replays`` tokens go to the experts that the engine chose, or else to those that were recorded; with
        ``records`` the latter are noted, in this micro-batch, while it is computed.
        """
        parallel, width = self._context.size > 1, _width(self.samples) if replays or records else None
        row = _cut_row(self.samples, self._context, self._multiple_of, width) if parallel else self._shared_row(width)
        rows_N, targets_N = np.concatenate(row.logit_rows), np.concatenate(row.targets)
        places_M = np.flatnonzero(rows_N >= 0)
        length = row.length + -row.length % self._multiple_of
        return PackedBatch(
            tokens_T=_joined(row.tokens, length).to(device),
            positions_T=_joined(row.positions, length).to(device),
            padding_T=~_joined(row.real, length).to(device),
            attention=layout(
                row.runs, row.continuations, length, device, rank=self._context.rank, ranks=self._context.size
            ),
            logit_rows_M=torch.from_numpy(rows_N[places_M]).to(device),
            targets_M=torch.from_numpy(targets_N[places_M]).to(device),
            places_M=torch.from_numpy(places_M).to(device) if parallel else None,
            num_targets=len(rows_N),
            computed_tokens=row.computed,
            computed_pairs=row.pairs,
            kept=_kept(self.samples, places_M, device),
            routing=self._routing(row, length, records=records) if replays or records else None,
        )

    def _routing(self, row: _Row, length: int, *, records: bool) -> Routing:
        engine_TW = None
        if row.experts:
            known_TW = np.concatenate(row.experts)
            engine_TW = torch.from_numpy(np.pad(known_TW, ((0, length - len(known_TW)), (0, 0)), constant_values=-1))
        return Routing(engine_TW, self._recorded, recording=records and engine_TW is None)

    def _shared_row(self, width: int | None) -> _Row:
        row, common = _Row(), self._beginning
        if common:
            first = self.samples[0]
            row.add(first.tokens[:common], np.arange(common), _experts(first, 0, common, width))
            row.runs.append(common)
        start = common
        for shared in self._shared:
            start = _add_group(row, shared, start, common, width)
        row.real = [np.ones(start, bool)]
        if not self._shared:
            start = 1
        row.length = row.computed = start
        row.pairs = sum(int(positions.sum()) for positions in row.positions) + start
        return row


def trained_positions(shard: TrainShard) -> list[int]:
    """Positions of the samples that have a token to train on."""
    return [position for position, sample in enumerate(shard.samples) if sample.loss_mask.any()]


def step_positions(shard: TrainShard, kept: Container[int]) -> list[list[list[int]]]:
    """By step and micro-batch, the positions that are in ``kept``; micro-batches without any are left out."""
    steps = [[[one for one in positions if one in kept] for positions in step.micro_batches] for step in shard.steps]
    return [[chosen for chosen in step if chosen] for step in steps]


def target_values(samples: Sequence[TrainSample], name: str) -> torch.Tensor | None:
    """An attribute with a number per response token, at the trained tokens [N]; ``None`` if a sample has none."""
    parts = [np.zeros(0, np.float32)]
    for sample in samples:
        values = getattr(sample, name)
        if values is None:
            return None
        parts.append(values[_mask(sample)])
    return torch.from_numpy(np.concatenate(parts))


def target_versions(samples: Sequence[TrainSample]) -> torch.Tensor:
    """The weight version that generated each trained token, -1 where no engine did, int64 [N]."""
    parts = [np.zeros(0, np.int64)]
    for sample in samples:
        versions, mask = sample.extras.get("weight_versions"), _mask(sample)
        known = versions is not None and len(versions) > 0
        parts.append(np.asarray(versions)[mask] if known else np.full(np.count_nonzero(mask), -1))
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _kept(given: Sequence[TrainSample], places_M: NDArray[np.int64], device: torch.device | None) -> KeptTokens | None:
    """The kept tokens of the targets at these places. Raises DataError if some samples have them and others don't."""
    samples = [sample for sample in given if sample.loss_mask.any()]
    counts: list[Any] = [sample.extras.get(KEPT_COUNTS) for sample in samples]
    missing = [sample.index for sample, one in zip(samples, counts, strict=True) if one is None]
    if len(missing) == len(samples):
        return None
    if missing:
        raise DataError(f"sample {missing[0]} has no kept tokens, and others of its micro-batch have; give all of them")
    masks = [_mask(sample) for sample in samples]
    known = zip(samples, masks, counts, strict=True)
    rows = [sample.extras[KEPT_IDS][np.repeat(mask, count)] for sample, mask, count in known]
    counts_N = np.concatenate([one[mask] for one, mask in zip(counts, masks, strict=True)])
    here_N = np.zeros(len(counts_N), bool)
    here_N[places_M] = True
    ids_K = np.concatenate(rows)[np.repeat(here_N, counts_N)]
    return KeptTokens(torch.from_numpy(ids_K).to(device), torch.from_numpy(counts_N[here_N]).to(device))


def _width(samples: Sequence[TrainSample]) -> int | None:
    """How many numbers the engine gave for the experts of a token; ``None`` if it gave none for any sample."""
    given = (sample.extras.get(ROUTED_EXPERTS) for sample in samples)
    return next((rows.shape[1] for rows in given if rows is not None), None)


def _experts(sample: TrainSample, start: int, end: int, width: int | None) -> NDArray[np.int16] | None:
    """The engine's experts for some of a sample's inputs, -1 where they are unknown; ``None`` without a width."""
    if width is None:
        return None
    rows, given = np.full((end - start, width), -1, np.int16), sample.extras.get(ROUTED_EXPERTS)
    if given is not None:
        known = given[start:end]
        rows[: len(known)] = known
    return rows


WORTH_SHARING = 0.1  # of a micro-batch's tokens
_NOTHING: NDArray[np.int64] = np.zeros(0, np.int64)


@dataclass
class _Row:
    """Parts of a packed row. ``real`` is false for padding, ``logit_rows`` −1 for targets of other ranks; ``length`` is
    T before padding."""

    tokens: list[NDArray[np.int64]] = field(default_factory=lambda: [_NOTHING])
    positions: list[NDArray[np.int64]] = field(default_factory=lambda: [_NOTHING])
    real: list[NDArray[np.bool_]] = field(default_factory=list)
    logit_rows: list[NDArray[np.int64]] = field(default_factory=lambda: [_NOTHING])
    targets: list[NDArray[np.int64]] = field(default_factory=lambda: [_NOTHING])
    runs: list[int] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    pairs: int = 0

    def add(self, tokens: NDArray[Any], positions: NDArray[Any], experts: NDArray[np.int16] | None) -> None:
        """Append tokens, with their places in their sample, and with their experts if those are known."""
        self.tokens.append(tokens)
        self.positions.append(positions)
        if experts is not None:
            self.experts.append(experts)


def _add_group(row: _Row, shared: Sequence[TrainSample], start: int, common: int, width: int | None) -> int:
    """Append the samples of one prompt, without its beginning that is in the row already; where they end."""
    first, prompt = shared[0], shared[0].prompt_length
    row.add(first.tokens[common:prompt], np.arange(common, prompt), _experts(first, common, prompt, width))
    end = rest = start + prompt - common
    for sample in shared:
        inputs, mask = sample.response_length - 1, _mask(sample)
        own = _experts(sample, prompt, prompt + inputs, width)
        row.add(sample.tokens[prompt:-1], np.arange(prompt, prompt + inputs), own)
        row.logit_rows.append(np.concatenate([[rest - 1], np.arange(end, end + inputs)])[mask])
        row.targets.append(sample.tokens[prompt:][mask])
        end += inputs
    beginning = np.arange(common)
    alone = len(shared) == 1
    row.runs.append(end - start if alone else rest - start)
    if common:
        row.continuations.append(Continuation(start, row.runs[-1], beginning))
    if not alone:
        row.runs += [sample.response_length - 1 for sample in shared if sample.response_length > 1]
        if end > rest:
            keys = np.concatenate([beginning, np.arange(start, rest)])
            row.continuations.append(Continuation(rest, end - rest, keys))
    return end


def _mask(sample: TrainSample) -> NDArray[np.bool_]:
    return sample.loss_mask.astype(bool)


def _joined(parts: Sequence[NDArray[Any]], length: int) -> torch.Tensor:
    """The parts as one tensor, filled up with zeros to ``length``."""
    joined = np.concatenate(parts)
    return torch.from_numpy(np.pad(joined, (0, max(length - len(joined), 0))))


def _share(samples: Sequence[TrainSample], share_prompts: str) -> tuple[list[list[int]], int]:
    """Places of samples that are laid out behind one prompt, and the number of first tokens that all prompts share.

    Where the engine's experts are known, they must be the same, too: a token that is computed once has one choice.
    """
    shared: dict[object, list[int]] = {}
    for place, sample in enumerate(samples):
        if sample.prompt_length < 1 or sample.response_length < 1:
            raise DataError(
                f"sample {sample.index} has {sample.prompt_length} prompt and {sample.response_length} response "
                "tokens; training needs at least one of each"
            )
        key: object = place
        if share_prompts != "off":
            rows, end = sample.extras.get(ROUTED_EXPERTS), sample.prompt_length
            key = sample.group_index, sample.tokens[:end].tobytes(), None if rows is None else rows[:end].tobytes()
        shared.setdefault(key, []).append(place)
    groups = list(shared.values())
    if share_prompts == "off":
        return groups, 0
    tokens = sum(len(sample.tokens) - 1 for sample in samples)
    firsts = [samples[group[0]] for group in groups]
    repeated = sum((len(group) - 1) * first.prompt_length for group, first in zip(groups, firsts, strict=True))
    common = _common_beginning(firsts)
    if common * (len(groups) - 1) < WORTH_SHARING * (tokens - repeated):
        common = 0
    if share_prompts == "auto" and repeated + common * (len(groups) - 1) < WORTH_SHARING * tokens:
        return [[place] for place in range(len(samples))], 0
    return groups, common


def _common_beginning(prompts: Sequence[TrainSample]) -> int:
    """How many first tokens all prompts have in common; of each at least its last one is left."""
    if len(prompts) < 2:
        return 0
    shortest = min(prompt.prompt_length for prompt in prompts) - 1
    alike = np.all([prompt.tokens[:shortest] == prompts[0].tokens[:shortest] for prompt in prompts], axis=0)
    if (width := _width(prompts)) is not None:
        chosen = [_experts(prompt, 0, shortest, width) for prompt in prompts]
        alike &= np.all([rows == chosen[0] for rows in chosen], axis=(0, 2))
    return int(alike.cumprod().sum())


def _cut_row(samples: Sequence[TrainSample], context: ContextParallel, multiple_of: int, width: int | None) -> _Row:
    """This rank's part of every sample."""
    row, start = _Row(), 0
    inputs = [sample.tokens[:-1] for sample in samples] or [np.zeros(1, np.int64)]
    unit = 2 * context.size * multiple_of
    lengths = [-(-len(tokens) // unit) * unit for tokens in inputs]
    row.length = sum(lengths) // context.size
    known = [_experts(sample, 0, len(sample.tokens) - 1, width) for sample in samples] or [None]
    given: Sequence[TrainSample | None] = samples or [None]  # a filler is a token of no sample
    for sample, tokens, chosen, length in zip(given, inputs, known, lengths, strict=True):
        gathered = np.empty(length, np.int64)  # where each position lies among the tokens of all ranks
        for rank in range(context.size):
            own = _zigzag(length, context, rank)
            gathered[own] = rank * row.length + start + np.arange(len(own))
        own = _zigzag(length, context, context.rank)
        padding = (0, length - len(tokens))
        if chosen is not None:
            chosen = np.pad(chosen, (padding, (0, 0)), constant_values=-1)[own]
        row.add(np.pad(tokens, padding)[own], own, chosen)
        row.real.append((own < len(tokens)) & bool(samples))
        real = own[own < len(tokens)]
        row.computed += len(real)
        row.pairs += int(real.sum()) + len(real)
        half = len(own) // 2
        for first in (0, half):
            row.runs.append(half)
            if own[first]:
                row.continuations.append(Continuation(start + first, half, gathered[: own[first]]))
        if sample is not None:
            local = np.full(length, -1)
            local[own] = start + np.arange(len(own))
            rows = local[sample.prompt_length - 1 : len(tokens)]
            row.logit_rows.append(rows[_mask(sample)])
            row.targets.append(sample.tokens[sample.prompt_length :][_mask(sample)])
        start += len(own)
    return row


def _zigzag(length: int, context: ContextParallel, rank: int) -> NDArray[np.int64]:
    """The positions of a padded sample that a rank holds: of 2 · size chunks, one near each end.

    With causal attention all ranks then have the same work (zig-zag ring attention; Megatron-core's order, too).
    """
    chunk = length // (2 * context.size)
    ends = rank * chunk, (2 * context.size - 1 - rank) * chunk
    return np.concatenate([np.arange(start, start + chunk) for start in ends])
