"""Softmax attention over a packed row of tokens, on the fastest exact kernel of each device.

Notation: T packed tokens, H query heads, J key/value heads (J divides H), S query heads per key head (H / J), E
    channels of a head, G rows of an attention block, Q queries and K keys of a row, X either of the two, or the queries
    of all heads that share a key head (S·Q).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from slime_megatron.packing import AttentionBlock, AttentionLayout


@dataclass
class LayoutParams(PackedSeqParams):  # type: ignore[misc]
    """Carries an attention layout through Megatron's layers to the core attention.

    ``qkv_format`` stays ``sbhd``, so that Megatron applies the rotary embedding it is handed row by row, by
    explicit position.
    """

    layout: AttentionLayout | None = None


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's ``core_attention`` for :class:`AttentionLayout`, without dropout."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_T1HE: torch.Tensor,
        key_T1JE: torch.Tensor,
        value_T1JE: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: LayoutParams,
        **unused: Any,
    ) -> torch.Tensor:
        """The output of every token, T × 1 × (H·E)."""
        layout = packed_seq_params.layout
        if layout is None:
            raise ValueError("PackedAttention needs LayoutParams with a layout")
        query_THE, key_TJE, value_TJE = (tensor.squeeze(1) for tensor in (query_T1HE, key_T1JE, value_T1JE))
        outputs = [self._attend(block, query_THE, key_TJE, value_TJE) for block in layout.blocks]
        output_TX = torch.cat(outputs).index_select(0, layout.output_rows_T)
        return output_TX.unsqueeze(1)

    def _attend(
        self, block: AttentionBlock, query_THE: torch.Tensor, key_TJE: torch.Tensor, value_TJE: torch.Tensor
    ) -> torch.Tensor:
        """Output of one block's queries, (G·Q) × (H·E)."""
        query_GHQE = _rows(query_THE, block.query_rows_GQ)
        key_GJKE = _rows(key_TJE, block.key_rows_GK)
        value_GJKE = _rows(value_TJE, block.key_rows_GK)
        output_GHQE = attend(query_GHQE, key_GJKE, value_GJKE, block.mask_G1QK, self.softmax_scale)
        return output_GHQE.transpose(1, 2).reshape(block.query_rows_GQ.numel(), -1)


def _rows(tensor_THE: torch.Tensor, rows_GX: torch.Tensor) -> torch.Tensor:
    """Tokens picked into rows, heads first: G × H × X × E."""
    picked = tensor_THE.index_select(0, rows_GX.flatten())
    return picked.view(*rows_GX.shape, *picked.shape[1:]).transpose(1, 2)


def attend(
    query_GHQE: torch.Tensor,
    key_GJKE: torch.Tensor,
    value_GJKE: torch.Tensor,
    mask_G1QK: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention with grouped queries.

    Args:
        query_GHQE: Queries.
        key_GJKE: Keys; query head h uses key head ⌊h / S⌋.
        value_GJKE: Values.
        mask_G1QK: True where a query sees a key; ``None`` for a causal square.
        scale: Factor on the scores; 1/√E unless given.

    Returns:
        G × H × Q × E, in the queries' type.
    """
    if query_GHQE.is_cpu and query_GHQE.dtype == torch.bfloat16:
        return _attend_bf16_cpu(query_GHQE, key_GJKE, value_GJKE, mask_G1QK, scale)
    return scaled_dot_product_attention(
        query_GHQE,
        key_GJKE,
        value_GJKE,
        attn_mask=mask_G1QK,
        is_causal=mask_G1QK is None,
        scale=scale,
        enable_gqa=query_GHQE.shape[1] != key_GJKE.shape[1],
    )


def _attend_bf16_cpu(
    query_GHQE: torch.Tensor,
    key_GJKE: torch.Tensor,
    value_GJKE: torch.Tensor,
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
    probs_GJXK = probs_GJSQK.to(value_GJKE.dtype).view_as(scores_GJXK)
    return torch.matmul(probs_GJXK, value_GJKE).view(query_GHQE.shape)
