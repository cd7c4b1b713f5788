"""``verify``: two checkpoints compared weight by weight, whatever their formats."""

from slime_convert.verify.compare import verify
from slime_convert.verify.result import Comparison, Difference

__all__ = ["Comparison", "Difference", "verify"]
