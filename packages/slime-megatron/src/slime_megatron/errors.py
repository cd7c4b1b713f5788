"""The trainer's errors."""

from __future__ import annotations

from slime_core.errors import SlimeError


class TrainingError(SlimeError):
    """Training cannot go on: a loss or a gradient is not finite."""


class CheckpointError(SlimeError):
    """A directory is no checkpoint, or a checkpoint does not fit the run."""
