"""New weights for running engines: one channel for each way by which they travel.

The trainer's rank 0 calls ``begin``, ``send`` for each bucket, ``end``; ``ChannelSpec(…).open()`` makes the channel
that a run's flags choose. Importing this imports torch, and nothing of SGLang.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from slime_core.interfaces import WeightChannel
from slime_rollout.engine.addresses import receivers_beside
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.weights.buckets import DistributedWeightChannel, TensorWeightChannel
from slime_rollout.weights.channel import engine_weight_version
from slime_rollout.weights.checkpoint import verify_checkpoint
from slime_rollout.weights.disk import DeltaWeightChannel, DiskWeightChannel
from slime_rollout.weights.receiver import DeltaReceiver, LocalCheckpoint

__all__ = [
    "ChannelSpec",
    "DeltaReceiver",
    "DeltaWeightChannel",
    "DiskWeightChannel",
    "DistributedWeightChannel",
    "LocalCheckpoint",
    "TensorWeightChannel",
    "engine_weight_version",
    "open_channel",
    "receivers_beside",
    "verify_checkpoint",
]


def open_channel(config: WeightSyncConfig, *, engine_urls: Sequence[str], **told: Any) -> WeightChannel:
    """The former way to say ``ChannelSpec(engine_urls, sync=config, …).open()``; it goes with the next release."""
    text = "open_channel is now ChannelSpec(engine_urls, sync=config, …).open(); it goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return ChannelSpec(tuple(engine_urls), sync=config, **told).open()
