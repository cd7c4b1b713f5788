"""Packed INT4 with one scale per group of columns: compressed-tensors' ``pack-quantized``, as Kimi-K2 publishes it.

A row is cut into groups of 32 or 128 neighbouring columns. Elements are whole numbers from -8 to 7 and
``weight ≈ q * scale``, with no zero point. Eight of them share an int32, the first in its lowest four bits, each stored
as q + 8.

Shape suffixes: R rows, C columns, P = C / 8 packed words (rounded up), g groups, h rows of one strip.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_convert.errors import WeightError
from slime_convert.quantize.fp8 import need_float_scales, refuse_overflow

GROUP_SIZES = (32, 128)
INT4_MIN, INT4_MAX = -8, 7
_OFFSET = 8
_PER_WORD = 8
_STRIP_ELEMENTS = 2**20


def pack_int4(q_RC: Tensor) -> Tensor:
    """Pack whole numbers from -8 to 7, eight in a word.

    Args:
        q_RC: ``int8``.

    Returns:
        packed_RP: ``int32``; a last word that is not full ends in zero bits.
    """
    if not q_RC.numel():
        return torch.empty(len(q_RC), -(-q_RC.shape[1] // _PER_WORD), dtype=torch.int32)
    missing = -q_RC.shape[1] % _PER_WORD
    nibbles = pad(q_RC + _OFFSET, (0, missing)) if missing else q_RC.contiguous() + _OFFSET
    # Two bytes become one, four of those a word: safetensors, and every machine that torch runs on, is little-endian.
    pairs = nibbles.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8).view(torch.int32)


def unpack_int4(packed_RP: Tensor, columns: int) -> Tensor:
    """The reverse of :func:`pack_int4`.

    Args:
        packed_RP: ``int32``.
        columns: C; what the last word holds beyond it is padding.

    Returns:
        q_RC: ``int8``, from -8 to 7.
    """
    pairs = packed_RP.contiguous().view(torch.uint8).to(torch.int16)
    return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.int8)[:, :columns] - _OFFSET


def quantize_int4(weight_RC: Tensor, group_size: int, *, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """Quantize a weight: scale = amax / 7 per group, rounded to the weight's type, q = round(weight / scale).

    Dividing by 7 makes the range symmetric, so that the largest element of a group keeps its value up to the scale's
    rounding. Quotients are taken in float32 with the rounded scale, the one a reader multiplies by; ties go to even.
    Float16's subnormal scales are so coarse that a quotient may pass the range; it is cut off, and -8 occurs only
    there. A group whose scale rounds to zero gets scale 1 and zeros.

    Args:
        weight_RC: Floating point; C is a multiple of ``group_size``.
        group_size: Columns that share a scale.
        name: What to call the weight in an error.

    Returns:
        packed_RP: ``int32``, eight elements in each.
        scale_Rg: The weight's type.

    Raises:
        WeightError: C is no multiple of ``group_size``, or the weight holds a NaN or an infinity.
    """
    rows, columns = weight_RC.shape
    if columns % group_size:
        raise WeightError(
            f"{name} has {columns} columns, which groups of {group_size} do not divide; "
            "choose another group size, or leave the weight as it is with --ignore"
        )
    packed_RP = torch.empty(rows, -(-columns // _PER_WORD), dtype=torch.int32)
    scale_Rg = torch.empty(rows, columns // group_size, dtype=weight_RC.dtype)
    height = _strip_rows(columns)
    for top in range(0, rows, height):
        strip_hC = weight_RC[top : top + height].float()
        groups = strip_hC.reshape(len(strip_hC), -1, group_size)
        scale_hg = (groups.abs().amax(-1) / INT4_MAX).to(weight_RC.dtype)
        if not scale_hg.isfinite().all():
            raise WeightError(f"{name} holds a NaN or an infinity, which INT4 cannot scale; repair the model")
        scale_hg[scale_hg == 0] = 1
        q_hC = (groups / scale_hg.unsqueeze(-1)).round_().clamp_(INT4_MIN, INT4_MAX).flatten(1)
        packed_RP[top : top + height] = pack_int4(q_hC.to(torch.int8))
        scale_Rg[top : top + height] = scale_hg
    return packed_RP, scale_Rg


def dequantize_int4(
    packed_RP: Tensor,
    scale_Rg: Tensor,
    columns: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "the weight",
) -> Tensor:
    """The weight that packed INT4 stands for: q * scale in float32, rounded once to ``dtype``.

    Args:
        packed_RP: ``int32``.
        scale_Rg: Floating point, one per row and group.
        columns: C of the weight.
        group_size: Columns that share a scale; the last group may be smaller.
        dtype: Element type of the result.
        name: What to call the weight in an error.

    Returns:
        weight_RC of type ``dtype``.

    Raises:
        WeightError: The parts do not fit together, or a product is not finite.
    """
    need_float_scales(scale_Rg, name)
    rows = len(packed_RP)
    wanted = (rows, -(-columns // _PER_WORD)), (rows, -(-columns // group_size))
    if (tuple(packed_RP.shape), tuple(scale_Rg.shape)) != wanted:
        raise WeightError(
            f"{name} has packed words of shape {tuple(packed_RP.shape)} and scales of shape {tuple(scale_Rg.shape)}; "
            f"{columns} columns in groups of {group_size} need shapes {wanted[0]} and {wanted[1]}; "
            "fetch the model again"
        )
    weight_RC = torch.empty(rows, columns, dtype=dtype)
    if not weight_RC.numel():
        return weight_RC
    height, width = _strip_rows(columns), min(group_size, columns)  # a config may name groups of any size
    for top in range(0, rows, height):
        scale_hC = scale_Rg[top : top + height].float().repeat_interleave(width, dim=1)[:, :columns]
        strip_hC = unpack_int4(packed_RP[top : top + height], columns).float().mul_(scale_hC)
        refuse_overflow(strip_hC, dtype, name)
        weight_RC[top : top + height] = strip_hC
    return weight_RC


def _strip_rows(columns: int) -> int:
    """Rows that are worked on at a time: the float32 copies stay small."""
    return max(1, _STRIP_ELEMENTS // max(columns, 1))
