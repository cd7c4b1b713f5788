"""Softmax attention over a packed row of tokens, on the fastest exact kernel of each device.

Notation: T packed tokens, H query heads, J key/value heads (J divides H), S query heads per key head (H / J), E
    channels of a head, G rows of an attention block, Q queries and K keys of a row, X either of the two, or the queries
    of all heads that share a key head (S·Q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Segment:
    """Queries that attend to keys: the last query to all of them, each one before it to one key less.

    Attributes:
        queries: Which packed token each is.
        keys: Likewise; of the ranks' tokens one after the other, over context-parallel ranks.
    """

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of equally many (padded) queries and keys, which one attention call handles.

    Attributes:
        query_rows_GQ: Which packed token each query is. Padding repeats token 0.
        key_rows_GK: Which token each key is; of the ranks' tokens one after the other, over context-parallel ranks.
            Padding repeats token 0.
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


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Carries what a packed row is through Megatron's layers, to the rotary embedding and the core attention.

    ``qkv_format`` stays ``sbhd``, so that Megatron applies the rotary angles it is handed row by row.
    """

    layout: AttentionLayout = field(default_factory=lambda: AttentionLayout((), torch.empty(0)))
    positions_T: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    angles: torch.Tensor | None = None  # of the rotary embedding, once they are known


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's ``core_attention`` for :class:`AttentionLayout`, without dropout.

    Over context-parallel ranks, keys and values are gathered from all of them.
    """

    def __init__(
        self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **unused: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
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
        layout = packed_seq_params.layout
        query_THE, key_TJE, value_TJF = (
            tensor.squeeze(1) if tensor.dim() == 4 else tensor for tensor in (query, key, value)
        )
        if self.context_group.size() > 1:
            key_TJE, value_TJF = (
                gather_from_sequence_parallel_region(tensor, group=self.context_group)
                for tensor in (key_TJE, value_TJF)
            )
        outputs = [self._attend(block, query_THE, key_TJE, value_TJF) for block in layout.blocks]
        output_TX = torch.cat(outputs).index_select(0, layout.output_rows_T)
        return output_TX.unsqueeze(1)

    def _attend(
        self, block: AttentionBlock, query_THE: torch.Tensor, key_TJE: torch.Tensor, value_TJF: torch.Tensor
    ) -> torch.Tensor:
        """Output of one block's queries, (G·Q) × (H·F)."""
        query_GHQE = _rows(query_THE, block.query_rows_GQ)
        key_GJKE = _rows(key_TJE, block.key_rows_GK)
        value_GJKF = _rows(value_TJF, block.key_rows_GK)
        output_GHQF = attend(query_GHQE, key_GJKE, value_GJKF, block.mask_G1QK, self.softmax_scale)
        return output_GHQF.transpose(1, 2).reshape(block.query_rows_GQ.numel(), -1)


def _rows(tensor_THE: torch.Tensor, rows_GX: torch.Tensor) -> torch.Tensor:
    """Tokens picked into rows, heads first: G × H × X × E."""
    picked = tensor_THE.index_select(0, rows_GX.flatten())
    return picked.view(*rows_GX.shape, *picked.shape[1:]).transpose(1, 2)


def attend(
    query_GHQE: torch.Tensor,
    key_GJKE: torch.Tensor,
    value_GJKF: torch.Tensor,
    mask_G1QK: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention with grouped queries.

    Args:
        query_GHQE: Queries.
        key_GJKE: Keys; query head h uses key head ⌊h / S⌋.
        value_GJKF: Values.
        mask_G1QK: True where a query sees a key; ``None`` for a causal square.
        scale: Factor on the scores; 1/√E unless given.

    Returns:
        G × H × Q × F, in the queries' type.
    """
    if query_GHQE.is_cpu and query_GHQE.dtype == torch.bfloat16:
        return _attend_bf16_cpu(query_GHQE, key_GJKE, value_GJKF, mask_G1QK, scale)
    return scaled_dot_product_attention(
        query_GHQE,
        key_GJKE,
        value_GJKF,
        attn_mask=mask_G1QK,
        is_causal=mask_G1QK is None,
        scale=scale,
        enable_gqa=query_GHQE.shape[1] != key_GJKE.shape[1],
    )


def _attend_bf16_cpu(
    query_GHQE: torch.Tensor,
    key_GJKE: torch.Tensor,
    value_GJKF: torch.Tensor,
    mask_G1QK: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """The same, as two batched products: torch's flash kernel for CPUs is 5 to 10 times slower than this in bf16's
    backward pass.

    Heads that share a key head become rows of one product. The softmax is computed in fp32.
    """
    groups, heads, queries, channels = query_GHQE.shape
    key_heads, keys = key_GJKE.shape[1:3]
    shared = heads // key_heads
    query_GJXE = query_GHQE.reshape(groups, key_heads, shared * queries, channels)
    scores_GJXK = torch.matmul(query_GJXE * (scale or channels**-0.5), key_GJKE.transpose(-1, -2))
    scores_GJSQK = scores_GJXK.view(groups, key_heads, shared, queries, keys)
    if mask_G1QK is None:
        mask_G1QK = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()
    masked_GJSQK = scores_GJSQK.masked_fill(~mask_G1QK[:, :, None], -torch.inf)
    probs_GJSQK = masked_GJSQK.softmax(-1, dtype=torch.float32)
    probs_GJXK = probs_GJSQK.to(value_GJKF.dtype).view_as(scores_GJXK)
    return torch.matmul(probs_GJXK, value_GJKF).view(groups, heads, queries, -1)


def layout(segments: Sequence[Segment], num_tokens: int, device: torch.device | None) -> AttentionLayout:
    """One attention block for whole segments and one for others; tokens in none (padding) get the output of token 0."""
    blocks: list[AttentionBlock] = []
    output_rows_T = np.zeros(num_tokens, np.int64)
    offset = 0
    for continued in (False, True):
        chosen = [segment for segment in segments if (len(segment.keys) > len(segment.queries)) == continued]
        if not chosen:
            continue
        block = _block(chosen, device)
        width = block.query_rows_GQ.shape[1]
        for number, segment in enumerate(chosen):
            output_rows_T[segment.queries] = offset + number * width + np.arange(len(segment.queries))
        offset += block.query_rows_GQ.numel()
        blocks.append(block)
    return AttentionLayout(tuple(blocks), torch.from_numpy(output_rows_T).to(device))


def _block(segments: list[Segment], device: torch.device | None) -> AttentionBlock:
    query_rows_GQ = _padded([segment.queries for segment in segments]).to(device)
    key_rows_GK = _padded([segment.keys for segment in segments]).to(device)
    if all(np.array_equal(segment.queries, segment.keys) for segment in segments):
        return AttentionBlock(query_rows_GQ, query_rows_GQ, None)
    # Query q of a row sees the row's first K − Q + q + 1 keys; a padded one, q ≥ Q, key 0 only.
    queries_G11, keys_G11 = (
        torch.tensor([len(part) for part in parts], device=device)[:, None, None]
        for parts in ([segment.queries for segment in segments], [segment.keys for segment in segments])
    )
    query_1Q1 = torch.arange(query_rows_GQ.shape[1], device=device)[None, :, None]
    last_GQ1 = torch.where(query_1Q1 < queries_G11, keys_G11 - queries_G11 + query_1Q1, 0)
    mask_GQK = torch.arange(key_rows_GK.shape[1], device=device)[None, None, :] <= last_GQ1
    return AttentionBlock(query_rows_GQ, key_rows_GK, mask_GQK[:, None])


def _padded(rows: list[NDArray[np.int64]]) -> torch.Tensor:
    """The rows, filled up with zeros to the longest."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return torch.from_numpy(padded)
