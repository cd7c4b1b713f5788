"""Softmax attention with grouped queries, on the fastest exact kernel of each device.

Notation: G rows, H query heads, J key/value heads (J divides H), S query heads per key head (H / J), Q queries and K
    keys of a row, E channels of a head, X the queries of all heads that share a key head (S·Q).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


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
