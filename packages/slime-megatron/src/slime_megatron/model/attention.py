"""Core attention over a packed row of tokens.

Notation: T packed tokens, H query heads, J key/value heads (J divides H), E channels of a head, G rows of an attention
    block, Q queries and K keys of a row, X either of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from slime_megatron.model.attend import attend
from slime_megatron.packing import AttentionBlock, AttentionLayout


@dataclass
class LayoutParams(PackedSeqParams):  # type: ignore[misc]
    """Carries an attention layout through Megatron's layers to the core attention.

    ``qkv_format`` stays ``sbhd``, so that Megatron applies the rotary embedding it is handed row by row, by
    explicit position.
    """

    layout: AttentionLayout | None = None


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's ``core_attention`` for :class:`AttentionLayout`, without dropout.

    Args:
        config: Megatron's transformer configuration.
        softmax_scale: Factor on the scores; 1/√E unless given.
    """

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
        """Attend as the layout says.

        Returns:
            The output of every token, T × 1 × (H·E).
        """
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
