"""Numbers of 8 and 4 bits that share scales: FP8 (DeepSeek-V3), INT4 (Kimi-K2) and MXFP4 (gpt-oss).

FP8: a weight is cut into blocks of 128 rows and 128 columns, the last ones smaller where they do not divide its shape.
A block has one float32 scale, amax / 448, and its elements are E4M3 (1 sign, 4 exponent and 3 fraction bits, no
infinity, largest 448): ``weight ≈ q * scale`` ("DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2, figure
7 b). The checkpoint calls the scale ``weight_scale_inv``, for it undoes the scaling.

INT4 (compressed-tensors' ``pack-quantized``): a row is cut into groups of 32 or 128 neighbouring columns. Elements are
whole numbers from -8 to 7 and ``weight ≈ q * scale``, with no zero point. Eight share an int32, the first in its
lowest four bits, each stored as q + 8.

MXFP4: a row is cut into blocks of 32 columns with one scale, a power of two stored as its exponent plus 127. Elements
are E2M1 (1 sign, 2 exponent and 1 fraction bit, no infinity); two share a byte, the first in its lowest four bits ("OCP
Microscaling Formats (MX) Specification", version 1.0).

Shape suffixes: R rows, C columns, h rows of one strip; of FP8 r and c blocks of rows and columns, w columns of one
block; of INT4 g groups, P = C / 8 packed words (rounded up); of MXFP4 E experts, B blocks, W bytes of a block.
``name`` is what an error calls the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_convert.errors import WeightError
from slime_convert.quantize.formats import need_whole_groups

Block = tuple[int, int]  # rows and columns
BLOCK = (128, 128)
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-50
"""Scale of blocks whose amax / 448 is below it, zeros for example. Dividing by a power of two is exact."""

_SIGN_AND_MAGNITUDE = -(2**31) + (127 << 20)


def blocks_of(rows: int, columns: int, block: Block = BLOCK) -> tuple[int, int]:
    """Number of blocks down and across a weight; smaller ones at the edges count."""
    return -(-rows // block[0]), -(-columns // block[1])


def quantize_fp8(
    weight_RC: Tensor, block: Block = BLOCK, scale_type: torch.dtype = torch.float32, *, name: str = "the weight"
) -> tuple[Tensor, Tensor]:
    """Quantize a weight: scale = max(amax / 448, 2⁻⁵⁰) per block, q = E4M3(weight / scale), all in float32.

    The scale is rounded to ``scale_type``, ``float32`` or ``bfloat16``, before it divides. Rounding is to nearest, ties
    to even. Nothing overflows: a quotient exceeds 448 by its own and the scale's rounding error at most, below 450, and
    all below 464 becomes 448. A bfloat16 weight that went through :func:`dequantize_fp8` gives the same again.

    Returns:
        q_RC: ``float8_e4m3fn``.
        scale_rc: ``scale_type``.

    Raises:
        WeightError: The weight holds a NaN or an infinity.
    """
    rows, columns = weight_RC.shape
    q_RC = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight_RC.device)
    scale_rc = torch.empty(blocks_of(rows, columns, block), dtype=scale_type, device=weight_RC.device)
    # One row of blocks at a time: the float32 copies stay small.
    for number, top in enumerate(range(0, rows, block[0])):
        strip_hC = weight_RC[top : top + block[0]].float()
        padded = pad(strip_hC, (0, -columns % block[1])) if columns % block[1] else strip_hC
        blocks_hcw = padded.reshape(len(strip_hC), -1, block[1])
        scale_c = (blocks_hcw.abs().amax(dim=(0, 2)) / E4M3_MAX).clamp_(min=SMALLEST_SCALE).to(scale_type).float()
        if not scale_c.isfinite().all():
            raise WeightError(f"{name} holds a NaN or an infinity, which FP8 cannot scale; repair the model")
        q_hcw = (blocks_hcw / scale_c[:, None]).to(torch.float8_e4m3fn)
        q_RC[top : top + block[0]] = q_hcw.view(len(strip_hC), -1)[:, :columns]
        scale_rc[number] = scale_c
    return q_RC, scale_rc


def dequantize_fp8(
    q_RC: Tensor,
    scale_rc: Tensor,
    block: Block = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
    *,
    name: str = "the weight",
) -> Tensor:
    """The weight that ``float8_e4m3fn`` with floating-point scales stands for: q * scale in float32, rounded once.

    Raises:
        WeightError: Number or type of the scales does not fit, or a product is not finite.
    """
    rows, columns = q_RC.shape
    _need_float_scales(scale_rc, name)
    if (found := tuple(scale_rc.shape)) != (wanted := blocks_of(rows, columns, block)):
        raise WeightError(
            f"{name} has shape {(rows, columns)} and scales of shape {found}; "
            f"blocks of {block} need scales of shape {wanted}; fetch the model again"
        )
    weight_RC = torch.empty(rows, columns, dtype=dtype)
    if not weight_RC.numel():
        return weight_RC
    width = min(block[1], columns)  # a config may name a block of any size
    for number, top in enumerate(range(0, rows, block[0])):
        scale_C = scale_rc[number].float().repeat_interleave(width)[:columns]
        strip_hC = _to_float32(q_RC[top : top + block[0]], name).mul_(scale_C)
        _refuse_overflow(strip_hC, dtype, name)
        weight_RC[top : top + block[0]] = strip_hC
    return weight_RC


def _need_float_scales(scales: Tensor, name: str) -> None:
    """Refuse scales that are whole numbers: they are codes that would have to be decoded first."""
    if not scales.is_floating_point():
        raise WeightError(f"{name} has scales of type {scales.dtype}; allowed: floating point; fetch the model again")


def _refuse_overflow(values: Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse values, one at least, that are not finite or would not be as ``dtype``."""
    # The two extremes stand for all: rounding keeps the order, and a NaN is passed on.
    if not torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
        raise WeightError(
            f"{name} times its scales holds a NaN, an infinity or what {dtype} has no room for; fetch the model again"
        )


def _to_float32(q: Tensor, name: str) -> Tensor:
    """E4M3 without NaNs as float32, exactly. Torch's cast does the same, twenty times slower on a CPU.

    The exponent's and fraction's bits go to the same places of a float32, where the bias is 127 and not 7.
    """
    codes = q.view(torch.int8)
    if (codes & 127).amax() == 127:
        raise WeightError(f"{name} holds a NaN; fetch the model again")
    bits = codes.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_SIGN_AND_MAGNITUDE)
    return bits.view(torch.float32).mul_(2.0**120)


INT4_MIN, INT4_MAX = -8, 7
_OFFSET = 8
_PER_WORD = 8
_STRIP_ELEMENTS = 2**20


def pack_int4(q_RC: Tensor) -> Tensor:
    """Pack ``int8`` from -8 to 7, eight in a word of ``int32``; a last word that is not full ends in zero bits."""
    if not q_RC.numel():
        return torch.empty(len(q_RC), -(-q_RC.shape[1] // _PER_WORD), dtype=torch.int32)
    missing = -q_RC.shape[1] % _PER_WORD
    nibbles = pad(q_RC + _OFFSET, (0, missing)) if missing else q_RC.contiguous() + _OFFSET
    # Two bytes become one, four of those a word: safetensors, and every machine that torch runs on, is little-endian.
    pairs = nibbles.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8).view(torch.int32)


def unpack_int4(packed_RP: Tensor, columns: int) -> Tensor:
    """The reverse of :func:`pack_int4`; what the last word holds beyond ``columns`` is padding."""
    pairs = packed_RP.contiguous().view(torch.uint8).to(torch.int16)
    return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.int8)[:, :columns] - _OFFSET


def quantize_int4(weight_RC: Tensor, group_size: int, *, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """Quantize a weight: scale = amax / 7 per group, rounded to the weight's type, q = round(weight / scale).

    Dividing by 7 makes the range symmetric, so that the largest element of a group keeps its value up to the scale's
    rounding. Quotients are taken in float32 with the rounded scale, the one a reader multiplies by; ties go to even.
    Float16's subnormal scales are so coarse that a quotient may pass the range; it is cut off, and -8 occurs only
    there. A group whose scale rounds to zero gets scale 1 and zeros.

    Returns:
        packed_RP: ``int32``.
        scale_Rg: The weight's type.

    Raises:
        WeightError: C is not a multiple of ``group_size``, or the weight holds a NaN or an infinity.
    """
    rows, columns = weight_RC.shape
    need_whole_groups(name, columns, group_size)
    packed_RP = torch.empty(rows, -(-columns // _PER_WORD), dtype=torch.int32, device=weight_RC.device)
    scale_Rg = torch.empty(rows, columns // group_size, dtype=weight_RC.dtype, device=weight_RC.device)
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
    """The weight that packed INT4 with floating-point scales stands for: q * scale in float32, rounded once.

    The last group of a row may be smaller than ``group_size``.

    Raises:
        WeightError: The parts do not fit together, or a product is not finite.
    """
    _need_float_scales(scale_Rg, name)
    rows = len(packed_RP)
    found = tuple(packed_RP.shape), tuple(scale_Rg.shape)
    wanted = (rows, -(-columns // _PER_WORD)), (rows, -(-columns // group_size))
    if found != wanted:
        raise WeightError(
            f"{name} has packed words of shape {found[0]} and scales of shape {found[1]}; {columns} columns in groups "
            f"of {group_size} need shapes {wanted[0]} and {wanted[1]}; fetch the model again"
        )
    weight_RC = torch.empty(rows, columns, dtype=dtype)
    if not weight_RC.numel():
        return weight_RC
    height, width = _strip_rows(columns), min(group_size, columns)  # a config may name groups of any size
    for top in range(0, rows, height):
        scale_hC = scale_Rg[top : top + height].float().repeat_interleave(width, dim=1)[:, :columns]
        strip_hC = unpack_int4(packed_RP[top : top + height], columns).float().mul_(scale_hC)
        _refuse_overflow(strip_hC, dtype, name)
        weight_RC[top : top + height] = strip_hC
    return weight_RC


def _strip_rows(columns: int) -> int:
    """Rows that are worked on at a time: the float32 copies stay small."""
    return max(1, _STRIP_ELEMENTS // max(columns, 1))


_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_LARGEST_SCALE = 252  # as stored, whose products bfloat16 has room for


def dequantize_mxfp4(blocks_ERBW: Tensor, scales_ERB: Tensor, *, name: str = "the weight") -> Tensor:
    """The weight that MXFP4 stands for: element × 2^(scale - 127).

    Args:
        blocks_ERBW: ``uint8``.
        scales_ERB: ``uint8``.
        name: What to call the weight in an error.

    Returns:
        weight_ECR: ``bfloat16``, inputs before outputs, as transformers has it in memory.

    Raises:
        WeightError: A scale is so large that a product is not finite.
    """
    if scales_ERB.numel() and (largest := int(scales_ERB.max())) > _LARGEST_SCALE:
        raise WeightError(
            f"{name} has a scale of 2^{largest - _BIAS}, for which bfloat16 has no room; fetch the model again"
        )
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([table[(blocks_ERBW & 15).int()], table[(blocks_ERBW >> 4).int()]], dim=-1)
    # Exact: one fraction bit times a power of two. The factor itself may be beyond bfloat16's normal numbers.
    scaled_ERBC = torch.ldexp(pairs.flatten(-2).float(), scales_ERB.int().unsqueeze(-1) - _BIAS).bfloat16()
    return scaled_ERBC.flatten(-2).transpose(1, 2).contiguous()
