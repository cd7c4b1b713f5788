"""The few things that differ between devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A kind of device that a trainer rank runs on.

    Attributes:
        torch_device: Where tensors live.
        backend: Process group backend: ``nccl`` or ``gloo``.
        synchronize: Waits until all queued work is done, so that wall times mean something.
    """

    torch_device: torch.device
    backend: str
    synchronize: Callable[[], None]

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU standing in for a GPU."""
        return self.torch_device.type == "cpu"
