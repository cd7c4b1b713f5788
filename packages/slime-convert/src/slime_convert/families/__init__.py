"""The model families, by Hugging Face ``model_type``: a file for each lineage.

``docs/how-to/new-family.md`` of slime's repository shows how a family is added.
"""

from slime_convert.families.known import FAMILIES, shape_values, unknown_family

__all__ = ["FAMILIES", "shape_values", "unknown_family"]
