"""Opened checkpoints of any format: weights by name, and what is known of them.

To add a format, write a subclass of :class:`Weights` and list it in :mod:`slime_convert.formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_convert.files.tensors import LazyTensor, TensorInfo
from slime_convert.formats.pickles import Name, Obj
from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape

Naming = Literal["huggingface", "megatron"]

VOCABULARY_WEIGHTS = ("output_layer.weight", "embedding.word_embeddings.weight")
"""Megatron's weights with a row per token of the vocabulary, which may be padded."""


class Weights:
    """The model's weights in a checkpoint; optimizer and random state are left out.

    Attributes:
        files: Bytes of each file that holds tensors.
        tensors: The weights by name, in the order in which they are best read; whole, whatever parallelism wrote them.
        naming: Whose names they have. Megatron's are those of :class:`slime_convert.mapping.WeightMap`.
        tied: Whether the output layer shares the embedding's weights; ``None`` if that is unknown.
        arguments: Megatron's arguments as recorded, plain values only.
        shape: The model's shape, if there is a config with the weights.
        storage: How the weights are quantized on the disk, and in what form they are here; ``None`` if they are not.
        optimizer: Tensors of the optimizer's state.
        notes: What else a reader should know.
    """

    directory: Path
    files: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]
    naming: Naming
    tied: bool | None = None
    arguments: Mapping[str, Any] = {}
    shape: ModelShape | None = None
    storage: str | None = None
    optimizer: Sequence[TensorInfo] = ()
    notes: Sequence[str] = ()

    def named(self, weight_map: WeightMap) -> Mapping[str, TensorInfo]:
        """The weights of a model's table under its names, and every other tensor under its name in ``tensors``.

        Called before :meth:`tensor`, so that a format whose shards are joined as the table says can keep it.
        """
        return self.tensors

    def tensor(self, name: str) -> LazyTensor:
        """One whole weight, by its name in ``tensors`` or :meth:`named`; a :class:`ConvertError` if it is missing."""
        raise NotImplementedError


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint.

    Attributes:
        looks_like: What a directory of this format holds, for messages.
        command: The command that converts it.
        find: The place in a user's path where the checkpoint is, such as one iteration; ``None`` if the path holds
            no checkpoint of this format. Raises a :class:`slime_convert.errors.ConvertError` if it is broken.
        open: The weights at the place that ``find`` returned.
    """

    name: str
    looks_like: str
    command: str
    find: Callable[[Path], Path | None]
    open: Callable[[Path], Weights]


def plain_arguments(args: Any) -> dict[str, Any]:
    """The arguments in a checkpoint's ``args`` that are numbers, texts, switches, types or lists of them."""
    args = args.state if isinstance(args, Obj) else args
    if not isinstance(args, Mapping):
        return {}
    return {
        name: value.removeprefix("torch ") if isinstance(value, Name) else value
        for name, value in args.items()
        # Lists in lists are left out: they may hold themselves.
        for items in [value if isinstance(value, list | tuple) else [value]]
        if isinstance(name, str) and all(isinstance(item, int | float | str) for item in items)
    }
