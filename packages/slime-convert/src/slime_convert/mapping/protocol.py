"""What a conversion asks of a model's weights, whoever knows their names and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class WeightTranslation(Protocol):
    """The weights of one model under both names, as :class:`slime_convert.mapping.WeightMap` explains them.

    Megatron's names are those of megatron-core's ``GPTModel`` with local layers, numbered in the whole model.
    """

    @property
    def family(self) -> str:
        """Hugging Face ``model_type``, for messages."""

    @property
    def equal_layers(self) -> bool:
        """Whether all layers have the same weights: ``torch_dist`` then stacks them."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding in Megatron."""

    def megatron_args(self) -> Mapping[str, Any]:
        """The arguments that a Megatron checkpoint of this model records, as plain values; ``None`` for those that
        the model lacks."""

    def megatron_names(self) -> Iterator[str]:
        """Every Megatron weight of the model, in the model's order."""

    def megatron_shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a Megatron weight, with the vocabulary's padding."""

    def stored_as(self, name: str) -> list[str]:
        """The names under which ``torch_dist`` checkpoints hold a Megatron weight."""

    def expert(self, name: str) -> int | None:
        """The number of the expert that a Megatron weight belongs to, if it does."""

    def hf_names(self) -> Iterator[str]:
        """Every Hugging Face weight of the model, in the model's order."""

    def hf_parts(self, name: str) -> list[str]:
        """The Hugging Face weights that one Megatron weight is made of."""

    def hf_copies(self) -> dict[str, str]:
        """Hugging Face weights that are copies of another, by name."""

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The Hugging Face weights inside a whole Megatron weight."""

    def from_hf(self, name: str, load: Callable[[str], Tensor]) -> Tensor:
        """A whole Megatron weight from its Hugging Face weights."""

    def merge_tp(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """A whole Megatron weight from its tensor-parallel shards in rank order."""
