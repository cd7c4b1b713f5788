"""Block-scaled FP8, the format of DeepSeek-V3's published weights.

A weight is cut into blocks of 128 rows and 128 columns, the last ones smaller where the shape is no multiple. A block
has one float32 scale, amax / 448, and its elements are E4M3 (1 sign, 4 exponent and 3 fraction bits, no infinity,
largest 448): ``weight ≈ q * scale`` ("DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2, figure 7 b). The
checkpoint calls the scale ``weight_scale_inv``, for it undoes the scaling.

Shape suffixes: R rows, C columns, r blocks of rows, c blocks of columns, h rows of one block, w columns of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_convert.errors import WeightError

BLOCK = (128, 128)
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-50
"""Scale of blocks whose amax / 448 is below it, so that a block of zeros has a scale too. A power of two, and all that
is divided by it is exact."""

_SIGN_AND_MAGNITUDE = -(2**31) + (127 << 20)


def blocks_of(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    """Number of blocks down and across a weight; edges count as blocks."""
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_fp8(
    weight_RC: Tensor, block: tuple[int, int] = BLOCK, *, name: str = "the weight"
) -> tuple[Tensor, Tensor]:
    """Quantize a weight: scale = max(amax / 448, 2⁻⁵⁰) per block, q = E4M3(weight / scale), all in float32.

    Rounding is to nearest, ties to even. Nothing overflows: a quotient exceeds 448 by its own rounding error at most,
    and all below 464 becomes 448. A bfloat16 weight that went through :func:`dequantize_fp8` gives the same again.

    Args:
        weight_RC: Floating point, of any size.
        block: Rows and columns of one block.
        name: What to call the weight in an error.

    Returns:
        q_RC: ``float8_e4m3fn``, the weight's shape.
        scale_rc: ``float32``, one per block.

    Raises:
        WeightError: The weight holds a NaN or an infinity.
    """
    rows, columns = weight_RC.shape
    q_RC = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale_rc = torch.empty(blocks_of(rows, columns, block))
    # One row of blocks at a time: the float32 copies stay small.
    for number, top in enumerate(range(0, rows, block[0])):
        strip_hC = weight_RC[top : top + block[0]].float()
        padded = pad(strip_hC, (0, -columns % block[1])) if columns % block[1] else strip_hC
        blocks_hcw = padded.reshape(len(strip_hC), -1, block[1])
        scale_c = (blocks_hcw.abs().amax(dim=(0, 2)) / E4M3_MAX).clamp_(min=SMALLEST_SCALE)
        if not scale_c.isfinite().all():
            raise WeightError(f"{name} holds a NaN or an infinity, which FP8 cannot scale; repair the model")
        q_hcw = (blocks_hcw / scale_c[:, None]).to(torch.float8_e4m3fn)
        q_RC[top : top + block[0]] = q_hcw.view(len(strip_hC), -1)[:, :columns]
        scale_rc[number] = scale_c
    return q_RC, scale_rc


def dequantize_fp8(
    q_RC: Tensor,
    scale_rc: Tensor,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "the weight",
) -> Tensor:
    """The weight that block-scaled FP8 stands for: q * scale in float32, rounded once to ``dtype``.

    Args:
        q_RC: ``float8_e4m3fn``.
        scale_rc: Floating point, one per block.
        block: Rows and columns of one block.
        dtype: Element type of the result.
        name: What to call the weight in an error.

    Returns:
        weight_RC of type ``dtype``.

    Raises:
        WeightError: Number or type of the scales does not fit, or a product is not finite.
    """
    rows, columns = q_RC.shape
    need_float_scales(scale_rc, name)
    if tuple(scale_rc.shape) != blocks_of(rows, columns, block):
        raise WeightError(
            f"{name} has shape {(rows, columns)} and scales of shape {tuple(scale_rc.shape)}; blocks of {block} need "
            f"scales of shape {blocks_of(rows, columns, block)}; fetch the model again"
        )
    weight_RC = torch.empty(rows, columns, dtype=dtype)
    if not weight_RC.numel():
        return weight_RC
    width = min(block[1], columns)  # a config may name a block of any size
    for number, top in enumerate(range(0, rows, block[0])):
        scale_C = scale_rc[number].float().repeat_interleave(width)[:columns]
        strip_hC = _to_float32(q_RC[top : top + block[0]], name).mul_(scale_C)
        refuse_overflow(strip_hC, dtype, name)
        weight_RC[top : top + block[0]] = strip_hC
    return weight_RC


def need_float_scales(scales: Tensor, name: str) -> None:
    """Refuse scales that are whole numbers: they are codes of something that would have to be decoded first.

    Raises:
        WeightError: They are.
    """
    if not scales.is_floating_point():
        raise WeightError(f"{name} has scales of type {scales.dtype}; allowed: floating point; fetch the model again")


def refuse_overflow(values: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse values that are not finite, or would not be as ``dtype``.

    Args:
        values: ``float32``, at least one.
        dtype: What they are going to be rounded to.
        name: What to call the weight in an error.

    Raises:
        WeightError: One is not finite.
    """
    # The two extremes stand for all: rounding keeps the order, and a NaN is passed on.
    if not torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
        raise WeightError(
            f"{name} times its scales holds a NaN, an infinity or what {dtype} has no room for; fetch the model again"
        )


def _to_float32(q: Tensor, name: str) -> Tensor:
    """E4M3 as float32, exactly. Torch's own cast does the same, twenty times slower on a CPU.

    The exponent's and fraction's bits go to the same places of a float32, where the bias is 127 and not 7.

    Raises:
        WeightError: There is a NaN.
    """
    codes = q.view(torch.int8)
    if (codes & 127).amax() == 127:
        raise WeightError(f"{name} holds a NaN; fetch the model again")
    bits = codes.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_SIGN_AND_MAGNITUDE)
    return bits.view(torch.float32).mul_(2.0**120)
