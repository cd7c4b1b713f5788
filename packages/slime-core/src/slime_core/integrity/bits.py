"""Tensors as plain integers of the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slime_core.errors import DataError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size; complex numbers get a last dimension of 2.

    Raises:
        DataError: The tensor's bits do not lie in memory element by element (sparse, quantized by torch, meta).
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = f"{tensor.device.type} tensor of {dtype_name(tensor.dtype)} with the layout {tensor.layout}"
        raise DataError(f"a {kind} has no bytes to read; give a dense tensor that holds data")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def flat(integers: Tensor) -> Tensor:
    """The elements in row-major order with a stride of 1: the same memory if the tensor is contiguous, else a copy."""
    whole = integers.contiguous()  # which says nothing of strides where a dimension has one element
    return whole.as_strided((whole.numel(),), (1,))


def flat_chunks(integers: Tensor, limit: int) -> Iterator[Tensor]:
    """The elements in row-major order, as flat tensors of at most ``limit`` elements.

    A contiguous tensor is not copied; of another one, no more than ``limit`` elements are copied at a time.
    """
    if integers.numel() == 0:
        return
    if integers.is_contiguous():
        yield from torch.split(flat(integers), limit)
        return
    row = integers.numel() // integers.shape[0]
    if row > limit:
        for part in integers:
            yield from flat_chunks(part, limit)
    else:
        for part in torch.split(integers, limit // row):
            yield flat(part)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor of plain integers, from any device."""
    buffer = bytearray(tensor.numel() * tensor.element_size())
    if buffer:
        torch.frombuffer(buffer, dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(buffer)


def from_bytes(data: bytes | memoryview, device: torch.device) -> Tensor:
    """Bytes as uint8 on a device."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
