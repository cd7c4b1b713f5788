"""Weight names and layouts of each model family, between Megatron and Hugging Face, both ways."""

from slime_convert.mapping.protocol import WeightTranslation
from slime_convert.mapping.weight_map import WeightMap

__all__ = ["WeightMap", "WeightTranslation"]
