"""The trainer's errors."""

from __future__ import annotations

from slime_core.errors import SlimeError


class TrainingError(SlimeError):
    """Training cannot go on: a loss or a gradient is not finite."""


class CheckpointError(SlimeError):
    """A checkpoint is missing or invalid, or does not fit the run."""
