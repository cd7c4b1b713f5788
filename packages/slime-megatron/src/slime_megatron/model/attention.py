"""Softmax attention over a packed row of tokens, without padding: what a token sees, and how that is computed.

A row is cut into runs: samples, or with shared prompts, prompts and responses. Every token sees its own run up to
itself. Runs that continue others (responses a prompt; under context parallelism, a chunk the chunks before it) also see
all tokens of those. So there are one or two variable-length calls; the second needs no mask.

Notation: T packed tokens, U of all context-parallel ranks, R of them in runs that continue others, C keys of those
    others, H query heads, J key/value heads (J divides H), E channels of queries and keys, F of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray

from slime_megatron.model.flash import FlashAttention, FlashCall, TorchFlash, flash_call
from slime_megatron.model.products import Product, ProductAttention, cut, products


@dataclass(frozen=True)
class Continuation:
    """Tokens that see all of some others, besides their own run.

    Attributes:
        start: The first of them; they are consecutive.
        length: How many they are.
        keys: Tokens that each of them sees; of the ranks' tokens one after the other, over context-parallel ranks.
    """

    start: int
    length: int
    keys: NDArray[np.int64]


@dataclass(frozen=True)
class AttentionLayout:
    """Who attends to whom in a packed row.

    Attributes:
        runs: Lengths of the runs, one after the other; padding is the last. Every token sees its own up to itself.
        continuations: Further keys that some tokens see.
        first_key: Which of all ranks' tokens the first of this rank is.
        num_keys: U.
        device: Where tensors go.
    """

    runs: NDArray[np.int64]
    continuations: tuple[Continuation, ...]
    first_key: int
    num_keys: int
    device: torch.device | None

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """As batched products without much padding."""
        tokens, starts = int(self.runs.sum()), self.runs.cumsum() - self.runs
        own = self.first_key + np.arange(tokens)
        made = [*products(cut(starts, self.runs, self.runs, own, causal=True), tokens, self.num_keys, self.device)]
        if self.continuations:
            pieces = cut(*self._continued, causal=False)
            made += products(pieces, tokens, self.num_keys, self.device)
        return tuple(made)

    @cached_property
    def flash_calls(self) -> tuple[FlashCall, ...]:
        """As variable-length calls."""
        tokens = int(self.runs.sum())
        own = None if tokens == self.num_keys else np.arange(self.first_key, self.first_key + tokens)
        calls = [flash_call(self.runs, self.runs, None, own, causal=True, device=self.device)]
        if self.continuations:
            _, queries, keys, key_rows = self._continued
            query_rows = np.concatenate([np.arange(one.start, one.start + one.length) for one in self.continuations])
            calls.append(flash_call(queries, keys, query_rows, key_rows, causal=False, device=self.device))
        return tuple(calls)

    @cached_property
    def _continued(self) -> tuple[NDArray[np.int64], ...]:
        """Starts and numbers of the queries, numbers of the keys, and all their rows."""
        numbers = np.array([(one.start, one.length, len(one.keys)) for one in self.continuations], np.int64)
        return *numbers.T, np.concatenate([one.keys for one in self.continuations])


def layout(
    runs: Sequence[int],
    continuations: Sequence[Continuation],
    num_tokens: int,
    device: torch.device | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> AttentionLayout:
    """The layout of a context-parallel rank's tokens: runs of these lengths, filled up to their number."""
    padding = num_tokens - sum(runs)
    return AttentionLayout(
        runs=np.array([*runs, *([padding] if padding else [])], np.int64),
        continuations=tuple(continuations),
        first_key=rank * num_tokens,
        num_keys=ranks * num_tokens,
        device=device,
    )


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Carries what a packed row is through Megatron's layers, to the rotary embedding and the attention.

    ``qkv_format`` stays ``sbhd``, so that Megatron applies the rotary angles it is handed row by row.
    """

    layout: AttentionLayout = field(default_factory=lambda: layout([], [], 0))
    positions_T: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    angles: torch.Tensor | None = None  # of the rotary embedding, once they are known


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's ``core_attention`` for :class:`AttentionLayout`, without dropout, by flash attention if wanted.

    Over context-parallel ranks, keys and values are gathered from all of them.
    """

    def __init__(
        self,
        config: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        flash: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self._flash = flash
        self.context_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedParams,
        **unused: Any,
    ) -> torch.Tensor:
        """The output of every token, T × 1 × (H·F), of T × 1 × H × E or, in latent attention, T × H × E."""
        query_THE, key_TJE, value_TJF = map(without_batch, (query, key, value))
        if self.context_group.size() > 1:
            gather = partial(gather_from_sequence_parallel_region, group=self.context_group)
            key_TJE, value_TJF = gather(key_TJE), gather(value_TJF)
        layout, scale = packed_seq_params.layout, self.softmax_scale
        return attend(query_THE, key_TJE, value_TJF, layout, scale, flash=self._flash).reshape(len(query), 1, -1)


def without_batch(tensor: torch.Tensor) -> torch.Tensor:
    """T × heads × channels, from Megatron's T × 1 × heads × channels or, in latent attention, as it is."""
    return tensor.squeeze(1) if tensor.dim() == 4 else tensor


def attend(
    query_THE: torch.Tensor,
    key_UJE: torch.Tensor,
    value_UJF: torch.Tensor,
    layout: AttentionLayout,
    scale: float | None = None,
    *,
    flash: bool = False,
) -> torch.Tensor:
    """Softmax attention with grouped queries, by batched products or flash attention.

    Args:
        query_THE: Queries of this rank's tokens.
        key_UJE: Keys of all ranks' tokens; query head h uses key head ⌊h·J / H⌋.
        value_UJF: Values.
        layout: Which query sees which key.
        scale: Factor on the scores; 1/√E unless given.
        flash: By variable-length flash attention, for 16-bit numbers on CUDA.

    Returns:
        T × H × F, in the queries' type.
    """
    scale = scale or query_THE.shape[-1] ** -0.5
    given = query_THE, key_UJE, value_UJF
    output: torch.Tensor
    if flash:
        output = FlashAttention.apply(*given, layout.flash_calls, scale, TorchFlash())  # type: ignore[no-untyped-call]
    else:
        output = ProductAttention.apply(*given, layout.products, scale)  # type: ignore[no-untyped-call]
    return output
