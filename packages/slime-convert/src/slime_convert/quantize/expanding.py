"""Quantized weights, expanded when they are needed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime_convert.errors import QuantizationError, WeightError
from slime_convert.files.reading import TensorReader, computed
from slime_convert.files.tensors import LazyTensor, concat, narrow
from slime_convert.quantize.formats import INSTEAD, Fp8Format, Int4Format, Mxfp4Format, QuantizedFormat

if TYPE_CHECKING:
    from torch import Tensor

SCALE_INV = "_scale_inv"
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
BLOCKS, SCALES = "_blocks", "_scales"
_PARTS = {Fp8Format: ("", SCALE_INV), Int4Format: (PACKED, SCALE, SHAPE), Mxfp4Format: (BLOCKS, SCALES)}


def expand(stored: Mapping[str, LazyTensor], form: QuantizedFormat, directory: Path) -> dict[str, LazyTensor]:
    """The weights of a quantized model in ``bfloat16``, computed when they are needed, in the order of its tensors.

    Raises:
        QuantizationError: No weight is quantized.
        WeightError: A part of a quantized weight is missing, or does not fit the others.
    """
    first, *others = _PARTS[type(form)]
    if isinstance(form, Fp8Format):
        quantized = [name for name, tensor in stored.items() if tensor.dtype == "float8_e4m3fn"]
        held = {*quantized, *(name for name in stored if name.endswith(SCALE_INV))}
    else:
        quantized = [name.removesuffix(first) for name in stored if name.endswith(first)]
        is_mxfp4 = isinstance(form, Mxfp4Format)
        held = {name for name in stored if (name.endswith((BLOCKS, SCALES)) if is_mxfp4 else is_packed_part(name))}
    _refuse_incomplete(directory, {name + part for name in quantized for part in (first, *others)}, held)
    if first and (twice := set(quantized) & stored.keys()):
        raise WeightError(
            f"{directory} has {min(twice)} both quantized and not ({len(twice)} such weights); fetch the model again"
        )
    expanded: dict[str, LazyTensor] = {}
    names = {name + first: name for name in quantized}
    with TensorReader() as reader:
        for stored_name, tensor in stored.items():
            if name := names.get(stored_name):
                parts = [tensor, *(stored[name + part] for part in others)]
                if isinstance(form, Fp8Format):
                    expanded[name] = _fp8_weight(name, directory, form.block, *parts)
                elif isinstance(form, Int4Format):
                    expanded[name] = _int4_weight(name, directory, form.group_size, reader, *parts)
                else:
                    expanded[name] = _mxfp4_weight(name, directory, *parts)
            elif stored_name not in held:
                expanded[stored_name] = tensor
        reader.finish()
    return expanded


def is_packed_part(name: str) -> bool:
    """Whether a tensor of an INT4 checkpoint is a part of a packed weight, by its name."""
    return name.endswith(PACKED) or ".weight_" in name


def _refuse_incomplete(directory: Path, wanted: set[str], held: set[str]) -> None:
    if not wanted:
        raise QuantizationError(f"{directory} has no quantized weights, but a quantization_config; fetch it again")
    if missing := wanted - held:
        raise WeightError(
            f"{directory} lacks {min(missing)} and {len(missing) - 1} more parts of quantized weights; fetch it again"
        )
    if extra := held - wanted:
        raise WeightError(
            f"{directory} has {min(extra)} and {len(extra) - 1} more parts that belong to no quantized weight of this "
            f"format (it has no zero points and no activation order); {INSTEAD}"
        )


def _numbers() -> ModuleType:
    """The module with the formulas, which loads torch: only once weights are read."""
    from slime_convert.quantize import numbers

    return numbers


def _fp8_weight(name: str, directory: Path, block: tuple[int, int], q: LazyTensor, scale: LazyTensor) -> LazyTensor:
    if len(q.shape) != 2:
        raise WeightError(f"{name} of {directory} is FP8 but not a matrix; fetch the model again")
    return computed("bfloat16", q.shape, lambda *of: _numbers().dequantize_fp8(*of, block=block, name=name), q, scale)


def _int4_weight(
    name: str, where: Path, group: int, reader: TensorReader, packed: LazyTensor, scale: LazyTensor, sizes: LazyTensor
) -> LazyTensor:
    item = {"int32": 4, "int64": 8}.get(sizes.dtype)
    shape: tuple[int, ...] = ()
    if item and len(sizes.shape) == 1 and sizes.shape[0] <= 8:
        data = reader.read(sizes)
        shape = tuple(int.from_bytes(data[i : i + item], "little", signed=True) for i in range(0, len(data), item))
    if len(shape) != 2 or min(shape) < 0 or packed.dtype != "int32" or packed.shape[:-1] != shape[:-1]:
        raise WeightError(
            f"{name}{PACKED} of {where} has type {packed.dtype} and shape {packed.shape}, which does not fit "
            f"{name}{SHAPE} {list(shape)}; allowed: int32 words of two-dimensional weights; fetch the model again"
        )
    wanted = -(-shape[1] // 8)  # before anything of that size is built
    if packed.shape[1:] != (wanted,):
        raise WeightError(
            f"{name}{PACKED} of {where} has {packed.shape[1:]} words in a row, and {shape[1]} columns need "
            f"{wanted}; fetch the model again"
        )

    def compute(*of: Any) -> Any:
        return _numbers().dequantize_int4(*of, columns=shape[1], group_size=group, name=name)

    return computed("bfloat16", shape, compute, packed, scale)


def _mxfp4_weight(name: str, directory: Path, blocks: LazyTensor, scales: LazyTensor) -> LazyTensor:
    if {blocks.dtype, scales.dtype} != {"uint8"} or blocks.shape[:-1] != scales.shape or len(scales.shape) != 3:
        raise WeightError(
            f"{name}{BLOCKS} of {directory} has type {blocks.dtype} and shape {blocks.shape}, its scales "
            f"{scales.dtype} {scales.shape}; allowed: uint8 (experts, rows, blocks, bytes) and a scale for each "
            "block; fetch the model again"
        )
    experts, rows, per_row, width = blocks.shape
    shape = (1, per_row * width * 2, rows)

    def compute(*of: Any) -> Any:
        return _numbers().dequantize_mxfp4(*of, name=name)

    # One expert at a time: in bfloat16 they take four times the room.
    pairs = [[narrow(tensor, 0, expert, 1) for tensor in (blocks, scales)] for expert in range(experts)]
    parts = [computed("bfloat16", shape, compute, *pair) for pair in pairs]
    return concat(parts) if parts else LazyTensor("bfloat16", (0, *shape[1:]), ())


def run(function: str, *tensors: Tensor, **options: Any) -> Any:
    """The former way to call a function of :mod:`slime_convert.quantize.numbers`."""
    from slime_convert.quantize import numbers

    warnings.warn(f"import {function} from slime_convert.quantize.numbers", DeprecationWarning, stacklevel=2)
    return getattr(numbers, function)(*tensors, **options)
