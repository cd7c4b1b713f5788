"""Quantized checkpoints: what ``quantization_config`` says of them, and their weights in ``bfloat16``.

The formulas, and shape suffixes as R rows and C columns, are those of ``quantize.numbers``, which alone needs torch.
"""

from functools import partial

from slime_convert.former_names import former
from slime_convert.quantize.formats import Fp8Format, Int4Format, Mxfp4Format, QuantizedFormat, format_of, read_format

__all__ = ["Fp8Format", "Int4Format", "Mxfp4Format", "QuantizedFormat", "format_of", "read_format"]

__getattr__ = partial(former, __name__)
