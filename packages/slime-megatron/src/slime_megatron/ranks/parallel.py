"""Join the other ranks: process groups, Megatron's parallel state and the seeds."""

from __future__ import annotations

import datetime
import ipaddress
import os
import random
import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from slime_core.types import Rendezvous
from slime_megatron.ranks.device import Device
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.megatron_values import layout_values


def join_ranks(config: MegatronConfig, rendezvous: Rendezvous, device: Device) -> None:
    """Meet the other ranks and divide them into model-parallel and data-parallel groups.

    Raises:
        ConfigError: The number of ranks is not a multiple of the model-parallel size.
    """
    config.data_parallel_size(rendezvous.world_size)
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    # Processes of a busy machine begin apart, by more than ranks in a step wait for each other.
    store = _store(rendezvous, max(timeout, datetime.timedelta(minutes=1)))
    dist.init_process_group(
        device.backend, store=store, rank=rendezvous.rank, world_size=rendezvous.world_size, timeout=timeout
    )
    parallel_state.initialize_model_parallel(
        **layout_values(config), distributed_timeout_minutes=config.distributed_timeout_minutes
    )


def _store(rendezvous: Rendezvous, to_meet: datetime.timedelta) -> Any:
    """Where ranks leave each other their addresses. Without a port nothing listens for it."""
    stores: Any = dist
    family, _, _, _, where = socket.getaddrinfo(rendezvous.address, rendezvous.port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(where[0]).is_loopback:
        # gloo and NCCL talk through an interface that they choose; a laptop's may be down, and others can reach it.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    if not rendezvous.port:
        file, size = rendezvous.file, rendezvous.world_size
        store = stores.HashStore() if file is None else stores.FileStore(file, size)
        store.set_timeout(to_meet)
        return store
    listen = rendezvous.listen
    if rendezvous.rank == 0 and listen is None:  # torch's store listens on every interface unless it is given a socket
        listen = socket.create_server(where, family=family).detach()
    return stores.TCPStore(
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        rendezvous.rank == 0,
        to_meet,
        master_listen_fd=listen,
    )


def leave_ranks() -> None:
    """Undo :func:`join_ranks`, so that the process can join others."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's trackers: replicas alike, stages of a pipeline apart, as in Megatron."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
