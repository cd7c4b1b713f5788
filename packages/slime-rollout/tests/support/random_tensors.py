"""Tensors of random bits, of every dtype, shape and memory layout."""

import math

import torch
from hypothesis import strategies as st

NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random_tensor(dtype, shape, seed):
    """Contiguous; all bit patterns, NaN of all kinds among them, but for bool, which has two."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor):
    """The bytes of a tensor as a list, element by element in row-major order: the slow and plain way."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def relaid(tensor, layout):
    """A tensor of the same bits with other strides."""
    if layout == "transposed":
        return (
            tensor.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0)
            if tensor.dim()
            else tensor
        )
    if layout == "strided":
        wide = torch.empty((*tensor.shape, 3), dtype=tensor.dtype)
        wide[..., 1] = tensor
        return wide[..., 1]
    if layout == "offset":
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        flat[1:] = tensor.reshape(-1)
        return flat[1:].view(tensor.shape)
    return tensor


LAYOUTS = ["contiguous", "transposed", "strided", "offset"]


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    return relaid(random_tensor(dtype, shape, draw(st.integers(0, 2**32))), draw(st.sampled_from(LAYOUTS)))
