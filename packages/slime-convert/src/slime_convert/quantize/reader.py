"""Quantized Hugging Face directories, read as if they had never been quantized."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from slime_convert.errors import QuantizationError, WeightError
from slime_convert.hf import HfReader
from slime_convert.quantize.formats import Fp8Format, Int4Format, read_format
from slime_convert.quantize.fp8 import dequantize_fp8
from slime_convert.quantize.int4 import dequantize_int4
from slime_convert.shard_file import TensorSpec

_SCALE_INV = "_scale_inv"
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"


class Fp8Reader(HfReader):
    """Block-scaled FP8 weights as bfloat16; all others as they are.

    Args:
        directory: Holds ``config.json`` and ``*.safetensors``.
        format_: What the config says.

    Raises:
        HfConfigError: There are no safetensors files, or one is damaged or missing.
        WeightError: An FP8 weight has no scales, or scales have no weight.
        QuantizationError: No weight is FP8.
    """

    def __init__(self, directory: str | Path, format_: Fp8Format) -> None:
        super().__init__(directory)
        self.format = format_
        stored = super().names_in_order
        self._quantized = {name for name in stored if super(Fp8Reader, self).spec(name).dtype is torch.float8_e4m3fn}
        scales = {name for name in stored if name.endswith(_SCALE_INV)}
        _refuse_incomplete(self.directory, self._quantized, {name + _SCALE_INV for name in self._quantized}, scales)
        for name in self._quantized:
            if len(super().spec(name).shape) != 2:
                raise WeightError(f"{name} of {self.directory} is FP8 but no matrix; fetch the model again")
        self._names = [name for name in stored if name not in scales]

    @property
    def names(self) -> set[str]:
        """Names of all weights but the scales."""
        return set(self._names)

    @property
    def names_in_order(self) -> list[str]:
        """Names of all weights but the scales, file by file."""
        return self._names

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of one weight, without reading it; ``bfloat16`` for the quantized ones."""
        spec = super().spec(name)
        return TensorSpec(name, torch.bfloat16, spec.shape) if name in self._quantized else spec

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight, without reading it; ``bfloat16`` for the quantized ones."""
        return torch.bfloat16 if name in self._quantized else super().dtype(name)

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightError: There is none of this name, its scales do not fit it, or it holds no finite numbers.
        """
        if name not in self._quantized:
            return super().load(name)
        q_RC, scale_rc = super().load(name), super().load(name + _SCALE_INV)
        return dequantize_fp8(q_RC, scale_rc, self.format.block, name=name)


class Int4Reader(HfReader):
    """Packed INT4 weights as bfloat16; all others as they are.

    Args:
        directory: Holds ``config.json`` and ``*.safetensors``.
        format_: What the config says.

    Raises:
        HfConfigError: There are no safetensors files, or one is damaged or missing.
        WeightError: A packed weight lacks its scales or its shape, has zero points, is there unpacked too, or the other
            way round.
        QuantizationError: No weight is packed.
    """

    def __init__(self, directory: str | Path, format_: Int4Format) -> None:
        super().__init__(directory)
        self.format = format_
        stored = super().names_in_order
        ending = f".weight{_PACKED}"
        self._quantized = {name.removesuffix(_PACKED) for name in stored if name.endswith(ending)}
        wanted = {name + suffix for name in self._quantized for suffix in (_PACKED, _SCALE, _SHAPE)}
        held = {name for name in stored if ".weight_" in name or name.endswith(_PACKED)}
        _refuse_incomplete(self.directory, self._quantized, wanted, held)
        if twice := self._quantized & set(stored):
            raise WeightError(
                f"{self.directory} has {min(twice)} both packed and not packed ({len(twice)} such weights); "
                "fetch the model again"
            )
        self._names = [name.removesuffix(_PACKED) for name in stored if name not in held or name.endswith(ending)]
        self._shapes = {name: self._read_shape(name) for name in self._names if name in self._quantized}

    @property
    def names(self) -> set[str]:
        """Names of all weights, those of the packed ones without their suffix."""
        return set(self._names)

    @property
    def names_in_order(self) -> list[str]:
        """Names of all weights, those of the packed ones without their suffix, file by file."""
        return self._names

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of one weight, without reading it; ``bfloat16`` for the quantized ones."""
        if name in self._quantized:
            return TensorSpec(name, torch.bfloat16, self._shapes[name])
        return super().spec(name)

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight, without reading it; ``bfloat16`` for the quantized ones."""
        return torch.bfloat16 if name in self._quantized else super().dtype(name)

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightError: There is none of this name, its parts do not fit together, or it holds no finite numbers.
        """
        if name not in self._quantized:
            return super().load(name)
        packed_RP, scale_Rg = super().load(name + _PACKED), super().load(name + _SCALE)
        return dequantize_int4(packed_RP, scale_Rg, self._shapes[name][1], self.format.group_size, name=name)

    def _read_shape(self, name: str) -> tuple[int, int]:
        shape = super().load(name + _SHAPE).tolist()
        packed = super().spec(name + _PACKED)
        sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if packed.dtype is not torch.int32 or not sizes or packed.shape[:-1] != tuple(shape[:-1]):
            raise WeightError(
                f"{name}{_PACKED} of {self.directory} has type {packed.dtype} and shape {packed.shape}, which does not "
                f"fit {name}{_SHAPE} {shape}; allowed: int32 words of two-dimensional weights; fetch the model again"
            )
        if len(shape) != 2:
            raise WeightError(f"{name} of {self.directory} has {len(shape)} axes; allowed: 2; fetch the model again")
        return shape[0], shape[1]


def open_weights(directory: str | Path) -> HfReader:
    """The weights of a Hugging Face directory: bfloat16 where they are stored as FP8 or INT4, else as they are.

    Raises:
        ConvertError: The directory is no readable model, or is quantized in another way.
    """
    format_ = read_format(Path(directory))
    if isinstance(format_, Fp8Format):
        return Fp8Reader(directory, format_)
    if isinstance(format_, Int4Format):
        return Int4Reader(directory, format_)
    return HfReader(directory)


def open_unquantized(directory: str | Path) -> HfReader:
    """The weights of a model that is to be quantized.

    Raises:
        QuantizationError: It is quantized already, by its config or by its weights.
        HfConfigError: The directory is no readable model.
    """
    origin = Path(directory)
    format_ = read_format(origin)
    if format_ is not None:
        command = "fp8-to-bf16" if isinstance(format_, Fp8Format) else "int4-to-bf16"
        raise QuantizationError(f"{origin} is quantized already; make it bfloat16 with slime-convert {command} first")
    reader = HfReader(origin)
    for name in reader.names_in_order:
        spec = reader.spec(name)
        is_quantized = (spec.dtype.itemsize == 1 and spec.dtype.is_floating_point) or name.endswith(_SCALE_INV)
        if is_quantized or name.endswith(f".weight{_PACKED}"):
            raise QuantizationError(
                f"{origin} has {name} of type {spec.dtype}: it is quantized already, though its config.json has no "
                "quantization_config; give an unquantized model"
            )
    return reader


def _refuse_incomplete(directory: Path, quantized: Iterable[str], wanted: set[str], held: set[str]) -> None:
    if not quantized:
        raise QuantizationError(
            f"{directory} has no quantized weights, though its config.json has a quantization_config; "
            "fetch the model again"
        )
    if missing := wanted - held:
        raise WeightError(
            f"{directory} lacks {min(missing)} and {len(missing) - 1} more parts of quantized weights; "
            "fetch the model again"
        )
    if extra := held - wanted:
        raise WeightError(
            f"{directory} has {min(extra)} and {len(extra) - 1} more parts that belong to no quantized weight of this "
            "format (it has no zero points and no activation order); convert the model's unquantized release"
        )
