"""``verify``: two checkpoints compared weight by weight, whatever their formats."""

from slime_convert.compare.checkpoints import verify
from slime_convert.compare.distance import Deviation, Kind, deviation
from slime_convert.compare.outcome import Comparison, Difference, Side

__all__ = ["Comparison", "Deviation", "Difference", "Kind", "Side", "deviation", "verify"]
