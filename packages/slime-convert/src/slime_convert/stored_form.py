"""Newer weights of a quantized model in the form in which it stores them: the same names, types and quantization."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from slime_convert.errors import HfConfigError, QuantizationError, WeightError
from slime_convert.files import read_json
from slime_convert.formats.safetensors import read_directory
from slime_convert.quantize.expanding import PACKED, SCALE, SCALE_INV, SHAPE
from slime_convert.quantize.formats import Fp8Format, Int4Format, read_format, settings_of
from slime_convert.quantize.numbers import quantize_fp8, quantize_int4


class StoredForm:
    """How a quantized Hugging Face model stores each weight.

    Attributes:
        format: How its weights are quantized.
        quantized: Those that are, by the names that they have unquantized.

    Raises:
        ConvertError: The model is unquantized, damaged, or quantized in a way that is only read.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory)
        form = read_format(path)
        if not isinstance(form, Fp8Format | Int4Format):
            raise QuantizationError(
                f"{path} is stored as {form or 'plain numbers'}; newer weights can be quantized as fp8 (blocks of "
                "float8_e4m3) or int4 (compressed-tensors, pack-quantized); give such a model, or one in bfloat16"
            )
        settings = settings_of(read_json(path, "config.json", HfConfigError, "give a Hugging Face model directory"))
        if (scale := settings.get("scale_fmt")) is not None:
            raise QuantizationError(
                f"{path} has scales of scale_fmt {scale!r}; newer weights can be quantized with floating-point scales "
                "alone; quantize the model in bfloat16 by slime-convert hf-to-fp8, or give that"
            )
        self.format: Fp8Format | Int4Format = form
        self._types = {name: entry.info.dtype for name, entry in read_directory(path).items()}
        self.quantized = frozenset(
            [name for name, dtype in self._types.items() if dtype == "float8_e4m3fn"]
            if isinstance(form, Fp8Format)
            else [name.removesuffix(PACKED) for name in self._types if name.endswith(PACKED)]
        )

    def tensors(self, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """A weight, and its scales next to it, as the model stores them; on the weight's device.

        One that the model stores unquantized takes its type there; one that it does not store stays as it is.

        Raises:
            WeightError: The weight holds a NaN or an infinity, or groups do not divide it.
        """
        if name not in self.quantized:
            return [(name, weight.to(self._type(name)) if name in self._types else weight)]
        if isinstance(self.format, Fp8Format):
            scale_type = self._type(name + SCALE_INV)
            q, scale = quantize_fp8(weight, self.format.block, scale_type, name=name)
            return [(name, q), (name + SCALE_INV, scale)]
        # Scales have the weight's type.
        plain = weight.to(self._type(name + SCALE))
        packed, scale = quantize_int4(plain, self.format.group_size, name=name)
        sizes = torch.tensor(weight.shape, dtype=self._type(name + SHAPE), device=weight.device)
        return [(name + PACKED, packed), (name + SCALE, scale), (name + SHAPE, sizes)]

    def _type(self, name: str) -> torch.dtype:
        if name not in self._types:
            raise WeightError(f"the quantized model lacks {name}; fetch it again")
        found = getattr(torch, self._types[name], None)
        if not isinstance(found, torch.dtype):
            raise WeightError(f"{name} of the quantized model has type {self._types[name]}; fetch it again")
        return found
