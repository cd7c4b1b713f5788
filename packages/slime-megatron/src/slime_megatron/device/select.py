"""Choose the device of a trainer process."""

from __future__ import annotations

import torch

from slime_megatron.device.base import Device
from slime_megatron.device.cpu import install_cpu_device


def select_device(threads: int | None = None) -> Device:
    """Make this process ready for Megatron: call it once, before anything imports Megatron.

    With CUDA, the process takes the first GPU it may see (the launcher gives each rank one) and NCCL; this branch
    has not been run on CUDA. Without CUDA, the CPU stand-ins are installed and gloo is used.

    Args:
        threads: CPU threads of this rank; torch's own choice unless given.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        return Device(torch.device("cuda", 0), "nccl", torch.cuda.synchronize)
    install_cpu_device()
    return Device(torch.device("cpu"), "gloo", lambda: None)
