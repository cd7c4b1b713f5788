"""Checkpoints to and from Hugging Face, Megatron ``torch_dist`` and GGUF, on any machine.

A name here loads its module when it is first asked for, so that importing the package takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_convert.check import check_model
    from slime_convert.compare import verify
    from slime_convert.convert import hf_to_torch_dist, megatron_to_hf, torch_dist_to_hf
    from slime_convert.errors import ConvertError
    from slime_convert.formats.hf import OutputOptions
    from slime_convert.gguf import gguf_to_hf
    from slime_convert.inspection import inspect_checkpoint
    from slime_convert.lora import merge_lora
    from slime_convert.mapping import WeightMap
    from slime_convert.progress import Converted, OnProgress, ProgressBar, ProgressLines
    from slime_convert.quantize.convert import fp8_to_bf16, hf_to_fp8, hf_to_int4, int4_to_bf16
    from slime_convert.shape import SHAPE_FLAGS, ModelShape, ShapeFlag, check_flags

__all__ = [
    "SHAPE_FLAGS",
    "ConvertError",
    "Converted",
    "ModelShape",
    "OnProgress",
    "OutputOptions",
    "ProgressBar",
    "ProgressLines",
    "ShapeFlag",
    "WeightMap",
    "check_flags",
    "check_model",
    "fp8_to_bf16",
    "gguf_to_hf",
    "hf_to_fp8",
    "hf_to_int4",
    "hf_to_torch_dist",
    "inspect_checkpoint",
    "int4_to_bf16",
    "megatron_to_hf",
    "merge_lora",
    "torch_dist_to_hf",
    "verify",
]

_MODULES = {
    "check": ("check_model",),
    "compare": ("verify",),
    "convert": ("hf_to_torch_dist", "megatron_to_hf", "torch_dist_to_hf"),
    "errors": ("ConvertError",),
    "formats.hf": ("OutputOptions",),
    "gguf": ("gguf_to_hf",),
    "inspection": ("inspect_checkpoint",),
    "lora": ("merge_lora",),
    "mapping": ("WeightMap",),
    "progress": ("Converted", "OnProgress", "ProgressBar", "ProgressLines"),
    "quantize.convert": ("fp8_to_bf16", "hf_to_fp8", "hf_to_int4", "int4_to_bf16"),
    "shape": ("SHAPE_FLAGS", "ModelShape", "ShapeFlag", "check_flags"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__``."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
