"""Join the other ranks: process groups, Megatron's parallel state and the seeds."""

from __future__ import annotations

import datetime
import ipaddress
import os
import random
import socket

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slime_core.types import Rendezvous
from slime_megatron.config import MegatronConfig
from slime_megatron.device import Device


def join_ranks(config: MegatronConfig, rendezvous: Rendezvous, device: Device) -> None:
    """Meet the other ranks and divide them into model-parallel and data-parallel groups.

    Raises:
        ConfigError: The number of ranks is no multiple of the model-parallel size.
    """
    config.data_parallel_size(rendezvous.world_size)
    if device.is_cpu and ipaddress.ip_address(socket.gethostbyname(rendezvous.address)).is_loopback:
        # gloo talks through the interface that the host's name leads to; a laptop's may be down, or lead elsewhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        device.backend,
        init_method=f"tcp://{rendezvous.address}:{rendezvous.port}",
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=datetime.timedelta(minutes=config.distributed_timeout_minutes),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        distributed_timeout_minutes=config.distributed_timeout_minutes,
    )


def leave_ranks() -> None:
    """Undo :func:`join_ranks`, so that the process can join others."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's trackers; all ranks alike, as replicas must be initialised alike."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
