"""The shape of a model: what ``config.json``, Megatron's shape flags and the weight tables agree on."""

from slime_convert.shape.arguments import check_args
from slime_convert.shape.flags import ShapeFlag, check_flags
from slime_convert.shape.model import MEGATRON_NAMES, SHAPE_FLAGS, ModelShape

__all__ = ["MEGATRON_NAMES", "SHAPE_FLAGS", "ModelShape", "ShapeFlag", "check_args", "check_flags"]
