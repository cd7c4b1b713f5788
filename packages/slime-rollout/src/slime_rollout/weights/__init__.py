"""New weights for running engines: one channel for each way by which they travel.

The trainer's rank 0 calls ``begin``, ``send`` for each bucket, ``end``; :func:`open_channel` makes the channel that a
run's flags choose. Importing this imports torch, and nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.interfaces import WeightChannel
from slime_rollout.engine.addresses import is_this_machine, receivers_beside
from slime_rollout.engine.config import WeightSyncConfig
from slime_rollout.engine.sglang_flags import engine_device
from slime_rollout.engine.transports import Route, chosen_of, transports
from slime_rollout.weights.buckets import DistributedWeightChannel, TensorWeightChannel
from slime_rollout.weights.channel import engine_weight_version
from slime_rollout.weights.checkpoint import verify_checkpoint
from slime_rollout.weights.disk import DeltaWeightChannel, DiskWeightChannel
from slime_rollout.weights.receiver import DeltaReceiver, LocalCheckpoint

__all__ = [
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


def open_channel(
    config: WeightSyncConfig,
    *,
    engine_urls: Sequence[str],
    tp_size: int,
    hf_checkpoint: str,
    receivers: Sequence[str] = (),
    colocate: bool = False,
    key: str | None = None,
) -> WeightChannel:
    """Make the sending end that the flags choose, in the process that sends. It connects in ``begin``.

    ``key`` is what engines ask for.

    Raises `ConfigError` on NCCL without CUDA, and `WeightSyncError` on deltas without a receiver.
    """
    common: dict[str, Any] = {
        "engine_urls": tuple(engine_urls),
        "tp_size": tp_size,
        "timeout": config.update_request_timeout,
        "load_timeout": config.update_weight_timeout,
        "pause_mode": config.update_weight_pause_mode,
        "check": config.check_weight_update_equal,
        "hf_checkpoint": hf_checkpoint,
        "key": key,
    }
    files: dict[str, Any] = {
        "directory": config.update_weight_disk_dir,
        "keep_files": config.update_weight_disk_keep_files,
    }
    if config.update_weight_mode == "delta":
        return DeltaWeightChannel(**common, **files, receivers=tuple(receivers))
    transport = config.update_weight_transport
    if transport == "auto":  # of engines that somebody else has started; a run says how its own are reached
        here = all(is_this_machine(url) for url in engine_urls)
        cuda = engine_device() == "cuda"
        route = Route(engines=len(engine_urls), within_node=here, cuda=cuda, shared=colocate)
        transport = chosen_of(transports(config, route)).name
    if transport == "disk":
        return DiskWeightChannel(**common, **files)
    if transport == "tensor":
        return TensorWeightChannel(**common, cuda_ipc=colocate)
    return DistributedWeightChannel(**common, backend=transport)
