"""The shape of a model: what ``config.json``, Megatron's shape flags and the weight mapping agree on. No torch here."""

from slime_convert.shape.families import FAMILIES, Family
from slime_convert.shape.flags import SHAPE_FLAGS, ShapeFlag, check_flags
from slime_convert.shape.model import ModelShape

__all__ = ["FAMILIES", "SHAPE_FLAGS", "Family", "ModelShape", "ShapeFlag", "check_flags"]
