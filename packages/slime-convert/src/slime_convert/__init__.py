"""Checkpoints to and from Hugging Face, Megatron ``torch_dist`` and GGUF, on any machine.

The model's shape and the errors are exported here and need no torch. The rest is imported from where it lives:
``slime_convert.mapping`` (weight names and reshaping, both ways), ``slime_convert.torch_dist`` (read and write
checkpoints), ``slime_convert.convert`` (whole conversions), ``slime_convert.verify`` (comparisons),
``slime_convert.inspection`` (contents, without torch) and ``slime_convert.gguf`` (needs the ``gguf`` extra).
"""

from slime_convert.errors import ConvertError
from slime_convert.shape import SHAPE_FLAGS, ModelShape, ShapeFlag, check_flags

__all__ = ["SHAPE_FLAGS", "ConvertError", "ModelShape", "ShapeFlag", "check_flags"]
