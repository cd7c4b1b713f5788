"""New weights for running engines: one channel for each way by which they travel.

The trainer's rank 0 calls ``begin``, ``send`` for each bucket, ``end``; :func:`open_channel` makes the channel that a
run's flags choose. Importing this imports torch, and nothing of SGLang.
"""

from slime_rollout.weights.channel import EngineChannel
from slime_rollout.weights.checkpoint import verify_checkpoint
from slime_rollout.weights.choose import open_channel, receivers_beside
from slime_rollout.weights.control import engine_weight_version
from slime_rollout.weights.delta import DeltaWeightChannel
from slime_rollout.weights.disk import DiskWeightChannel
from slime_rollout.weights.distributed import DistributedWeightChannel
from slime_rollout.weights.follow import Follower
from slime_rollout.weights.local import LocalCheckpoint
from slime_rollout.weights.receiver import DeltaReceiver
from slime_rollout.weights.tensor import TensorWeightChannel

__all__ = [
    "DeltaReceiver",
    "DeltaWeightChannel",
    "DiskWeightChannel",
    "DistributedWeightChannel",
    "EngineChannel",
    "Follower",
    "LocalCheckpoint",
    "TensorWeightChannel",
    "engine_weight_version",
    "open_channel",
    "receivers_beside",
    "verify_checkpoint",
]
