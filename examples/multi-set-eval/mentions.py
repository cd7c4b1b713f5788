"""The reward of the set `capitals` of laptop-sets.yaml."""

from __future__ import annotations

from typing import Any


def custom_rm(args: Any, sample: Any) -> float:
    """1 if the response mentions the label."""
    return float(sample.label.lower() in sample.response.lower())
