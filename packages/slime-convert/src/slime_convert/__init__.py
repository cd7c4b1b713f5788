"""Checkpoints to and from Hugging Face, Megatron ``torch_dist`` and GGUF, on any machine.

A name here loads its module when it is first asked for, so that importing the package takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slime_convert.former_names import find_moved_modules

if TYPE_CHECKING:
    from slime_convert.check import check_model as check_model
    from slime_convert.compare import verify as verify
    from slime_convert.conversions.from_gguf import gguf_to_hf as gguf_to_hf
    from slime_convert.conversions.from_megatron import megatron_to_hf as megatron_to_hf
    from slime_convert.conversions.from_megatron import torch_dist_to_hf as torch_dist_to_hf
    from slime_convert.conversions.lora import merge_lora as merge_lora
    from slime_convert.conversions.quantized import fp8_to_bf16 as fp8_to_bf16
    from slime_convert.conversions.quantized import hf_to_fp8 as hf_to_fp8
    from slime_convert.conversions.quantized import hf_to_int4 as hf_to_int4
    from slime_convert.conversions.quantized import int4_to_bf16 as int4_to_bf16
    from slime_convert.conversions.to_megatron import hf_to_torch_dist as hf_to_torch_dist
    from slime_convert.errors import ConvertError as ConvertError
    from slime_convert.formats.hf import OutputOptions as OutputOptions
    from slime_convert.inspection import inspect_checkpoint as inspect_checkpoint
    from slime_convert.mapping import WeightMap as WeightMap
    from slime_convert.progress import Converted as Converted
    from slime_convert.progress import OnProgress as OnProgress
    from slime_convert.progress import ProgressBar as ProgressBar
    from slime_convert.progress import ProgressLines as ProgressLines
    from slime_convert.shape import SHAPE_FLAGS as SHAPE_FLAGS
    from slime_convert.shape import ModelShape as ModelShape
    from slime_convert.shape import ShapeFlag as ShapeFlag
    from slime_convert.shape import check_flags as check_flags
else:
    _NAMES = {
        "check": "check_model",
        "compare": "verify",
        "conversions.from_gguf": "gguf_to_hf",
        "conversions.from_megatron": "megatron_to_hf torch_dist_to_hf",
        "conversions.lora": "merge_lora",
        "conversions.quantized": "fp8_to_bf16 hf_to_fp8 hf_to_int4 int4_to_bf16",
        "conversions.to_megatron": "hf_to_torch_dist",
        "errors": "ConvertError",
        "formats.hf": "OutputOptions",
        "inspection": "inspect_checkpoint",
        "mapping": "WeightMap",
        "progress": "Converted OnProgress ProgressBar ProgressLines",
        "shape": "SHAPE_FLAGS ModelShape ShapeFlag check_flags",
    }
    _HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
    __all__ = sorted(_HOMES, key=lambda name: (not name.isupper(), name))

    def __getattr__(name: str) -> Any:
        """Load a name of ``__all__``."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


find_moved_modules()
