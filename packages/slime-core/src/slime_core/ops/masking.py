"""Inputs of the losses: wide enough to sum, and clean where a token does not count. T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.errors import DataError


def widen(values: Tensor) -> Tensor:
    """The values in fp32 where they came in less (bf16: a clip range of 2e-4 is lost in it). fp64 stays. Any shape."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked(mask_T: Tensor | None, **values_T: Tensor) -> list[Tensor]:
    """The values, widened, and 0 where the mask is 0, whatever stood there, NaN too. No gradient goes to such places.

    A weight of 0 on the loss is not enough for that: 0 × NaN is NaN, in the value and in the gradient.

    Args:
        mask_T: 0 where a token does not count, anything else where it does: a loss mask, or token weights. ``None``
            keeps all. Any shape, that of the values.
        values_T: Tensors by name, all of one shape.

    Returns:
        The tensors in the order they were given.

    Raises:
        DataError: The shapes differ.
    """
    given = values_T if mask_T is None else {**values_T, "mask_T": mask_T}
    if len({tensor.shape for tensor in given.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        raise DataError(f"these must have one shape, one number per token each: {shapes}")
    wide_T = [widen(tensor) for tensor in values_T.values()]
    return wide_T if mask_T is None else [tensor.masked_fill(mask_T == 0, 0) for tensor in wide_T]
