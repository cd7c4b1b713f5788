"""Which part of the vocabulary a rank holds, and whether the targets lie in it.

Shapes: T tokens.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import Tensor

from slime_core.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: ids ``first`` to ``first + columns`` of ``vocab_size``, padding left out."""

    first: int
    columns: int
    vocab_size: int

    @classmethod
    def of(cls, columns: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> VocabShard:
        """The shard of this rank of the group.

        Args:
            columns: Columns held by each rank, padding included.
            group: Tensor-parallel group; ``None`` if all columns are here.
            vocab_size: Ids from here on are padding; ``None`` means no padding.

        Raises:
            ConfigError: ``vocab_size`` is below 1 or above the columns of all ranks.
        """
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if vocab_size is None:
            vocab_size = columns * world
        if not 1 <= vocab_size <= columns * world:
            raise ConfigError(
                f"vocab_size {vocab_size} must be between 1 and the {columns * world} columns of logits "
                f"({world} ranks × {columns})"
            )
        return cls(rank * columns, min(max(vocab_size - rank * columns, 0), columns), vocab_size)

    def valid(self, targets_T: Tensor) -> Tensor:
        """Whether each target is in the vocabulary, padding left out [T].

        Raises:
            DataError: One is not. On a CPU only: elsewhere looking would stall the device.
        """
        valid_T = (targets_T >= 0) & (targets_T < self.vocab_size)
        if targets_T.device.type == "cpu" and not bool(valid_T.all()):
            first = int(targets_T[~valid_T][0])
            raise DataError(f"token id {first} is outside the vocabulary of {self.vocab_size}; check the tokenizer")
        return valid_T


def check_temperature(temperature: float) -> None:
    """Raise ConfigError unless it is above 0."""
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature} must be above 0")
