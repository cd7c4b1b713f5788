"""How Hugging Face tensors are laid out inside one Megatron tensor. Pure functions; the two of a pair are inverses.

Notation: G key-value groups, Q query heads per group, E channels per head, F MLP channels, D trailing channels
(hidden size; none for a bias).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_convert.shape import ModelShape


@dataclass(frozen=True)
class Layout:
    """A way to join Hugging Face tensors into one Megatron tensor, and to cut it into them again.

    Attributes:
        join: Parts (in the rule's order) and shape → the Megatron tensor.
        cut: The Megatron tensor and shape → the parts. They may be views of it.
    """

    join: Callable[[Sequence[Tensor], ModelShape], Tensor]
    cut: Callable[[Tensor, ModelShape], list[Tensor]]


def _join_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Query, key and value (heads × E, D) → per group its queries, its key, its value: (G × (Q + 2) × E, D)."""
    groups = [part.reshape(shape.num_query_groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _cut_qkv(whole: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of :func:`_join_qkv`."""
    per_group = shape.num_attention_heads // shape.num_query_groups
    groups = whole.reshape(shape.num_query_groups, (per_group + 2) * shape.kv_channels, *whole.shape[1:])
    sizes = [per_group * shape.kv_channels, shape.kv_channels, shape.kv_channels]
    return [part.flatten(0, 1) for part in torch.split(groups, sizes, dim=1)]


ONE_TO_ONE = Layout(join=lambda parts, _: parts[0], cut=lambda whole, _: [whole])
"""One Hugging Face tensor as it is."""

GROUPED_QKV = Layout(join=_join_qkv, cut=_cut_qkv)
"""Query, key and value projections, interleaved by key-value group."""

GATE_UP = Layout(join=lambda parts, _: torch.cat(list(parts)), cut=lambda whole, _: list(whole.chunk(2)))
"""The MLP's gate projection (F, D), then its up projection (F, D)."""
