"""What the trainer computes on: CUDA with NCCL, or a CPU with gloo. Nothing is changed until :func:`select_device`
is called."""

from __future__ import annotations

from slime_megatron.device.base import Device
from slime_megatron.device.cpu import install_cpu_device
from slime_megatron.device.select import select_device

__all__ = ["Device", "install_cpu_device", "select_device"]
