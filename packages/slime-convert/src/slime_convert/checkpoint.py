"""What checkpoints of every format have in common: a list of contents, and weights that are read one by one.

No torch here. A format is added by writing one :class:`Format` and naming it in :mod:`slime_convert.formats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slime_convert.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from slime_convert.mapping import WeightTranslation

Naming = Literal["huggingface", "megatron"]

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}
"""Bytes of one element, by torch's name of the type."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor, without its elements.

    Attributes:
        name: As the checkpoint's format names it.
        dtype: Torch's name of the element type, such as ``bfloat16``.
        shape: Its whole shape.
        nbytes: Bytes of its elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


def tensor_info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A :class:`TensorInfo` whose bytes follow from type and shape; the type must be in :data:`ITEM_BYTES`.

    Raises:
        ValueError: A length is negative, or the tensor larger than any.
    """
    if any(length < 0 for length in shape) or math.prod(shape) >= 2**60:
        raise ValueError(f"{name} has shape {shape}")
    return TensorInfo(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype])


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds, told from its headers alone.

    Attributes:
        format: Name of the format, such as ``hf``.
        directory: Where the files are; one iteration of a Megatron checkpoint; a GGUF file itself.
        files: Bytes of each file that holds tensors.
        tensors: The model's tensors.
        optimizer: Tensors of the optimizer's state.
        iteration: ``release`` or a step, of a Megatron checkpoint.
        iterations: Every iteration that lies beside it, this one included.
        family: Hugging Face ``model_type``, or what GGUF calls the architecture; ``None`` if nothing tells it.
        shape: The model's shape; ``None`` if nothing tells it, or the family is not supported.
        arguments: Megatron's arguments as the checkpoint records them, plain values only.
        quantization: Method and settings, of a quantized model.
        packed_bits: Bits of one parameter in tensors named ``*_packed``.
        repeated: Tensors that are no parameters of their own, because another holds the same.
        notes: What else a reader should know.
    """

    format: str
    directory: Path
    files: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    optimizer: tuple[TensorInfo, ...] = ()
    iteration: str | None = None
    iterations: tuple[str, ...] = ()
    family: str | None = None
    shape: ModelShape | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    packed_bits: int = 4
    repeated: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, whatever the format: each once, packed integers one by one, and neither scales nor
        the vocabulary's padding."""
        return sum(self._parameters(tensor) for tensor in self.tensors if tensor.name not in self.repeated)

    def _parameters(self, tensor: TensorInfo) -> int:
        if tensor.name.endswith(_QUANTIZATION_SUFFIXES):
            return 0
        if tensor.name.endswith("_packed"):
            return tensor.nbytes * 8 // self.packed_bits
        vocab_size = self.arguments.get("vocab_size")
        rows = tensor.shape[0] if tensor.name in VOCABULARY_WEIGHTS and tensor.shape else 0
        if isinstance(vocab_size, int) and 0 < vocab_size < rows:
            return tensor.num_elements // rows * vocab_size
        return tensor.num_elements


VOCABULARY_WEIGHTS = ("output_layer.weight", "embedding.word_embeddings.weight")
"""Megatron's weights with a row per token of the vocabulary, which may be padded."""

# What FP8 and compressed-tensors checkpoints keep beside a weight.
_QUANTIZATION_SUFFIXES = ("_scale_inv", "weight_scale", "input_scale", "_zero_point", "weight_shape", "weight_g_idx")


class Weights(Protocol):
    """The model's weights, read one by one; optimizer and random state are left out."""

    @property
    def directory(self) -> Path:
        """Where they are, for messages."""
        ...

    @property
    def naming(self) -> Naming:
        """Whose names the weights have. Megatron's are those of :class:`slime_convert.mapping.WeightMap`."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The weights by name, in the order in which they are best read; whole, whatever parallelism wrote them."""
        ...

    @property
    def tied(self) -> bool | None:
        """Whether the output layer shares the embedding's weights; ``None`` if nothing tells."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's arguments as recorded; empty without any."""
        ...

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, if a config lies beside the weights."""
        ...

    @property
    def storage(self) -> str | None:
        """How the weights are quantized on disk, and in what form they are here; ``None`` if they are not quantized."""
        ...

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The weights under the names that a model's table gives them, where the format has names of its own.

        Called before ``load``, so that a format whose shards are merged as the table says can keep it.

        Returns:
            The table's weights that are there, and every tensor that is none of them under its name in ``tensors``.
        """
        ...

    def load(self, name: str) -> Tensor:
        """One whole weight.

        Args:
            name: Of ``tensors`` or ``named``.

        Raises:
            ConvertError: It cannot be read.
        """
        ...


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint.

    Attributes:
        name: As users know it.
        looks_like: What a directory of this format holds, for messages.
        command: Which command converts it.
        find: Where the checkpoint is that a user's path names, such as one iteration of it; ``None`` if the path holds
            none of this format. Raises a :class:`slime_convert.errors.ConvertError` if it holds a broken one.
        inspect: Its contents, told from what ``find`` gave.
        open: Its weights, likewise, in a ``with`` statement.
    """

    name: str
    looks_like: str
    command: str
    find: Callable[[Path], Path | None]
    inspect: Callable[[Path], Contents]
    open: Callable[[Path], AbstractContextManager[Weights]]
