"""Checkpoints in Megatron's ``torch_dist`` format. Finding one needs no torch; reading and writing do."""

from __future__ import annotations

from slime_megatron.checkpoint.find import CheckpointInfo, find_checkpoint, reference_source

__all__ = ["CheckpointInfo", "find_checkpoint", "reference_source"]
