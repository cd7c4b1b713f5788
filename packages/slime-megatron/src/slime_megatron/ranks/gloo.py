"""Collectives that Megatron needs of gloo, which takes NCCL's place without CUDA. Importing this changes nothing."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed


def suit_gloo() -> None:
    """Change gloo's part of torch in this process; call it once, before a process group is made."""
    _exchange_unequal_parts()
    _share_device()


def _share_device() -> None:
    """Have all gloo groups of this process use one device. Megatron makes dozens of groups.

    By default each has its own device, whose thread wakes a hundred times a second: 60 groups took 4.4% of a core while
    nothing was to be done. With one device they take 0.2%.
    """
    groups: Any = torch.distributed.ProcessGroupGloo
    make = groups.__init__
    devices: list[Any] = []

    def make_with_device(self: Any, *given: Any, **named: Any) -> None:
        if devices and named.keys() == {"timeout"}:
            options = groups._Options()
            options._devices, options._threads = devices, 2 * len(devices)  # threads as by default
            options._timeout = named["timeout"]
            make(self, *given, options)
            return
        make(self, *given, **named)
        devices[:] = devices or self.options._devices

    groups.__init__ = make_with_device
    os.register_at_fork(after_in_child=devices.clear)  # the thread stays with the parent


def _exchange_unequal_parts() -> None:
    """Megatron's dispatcher of experts exchanges parts of different sizes, and gives the sizes as tensors.

    NCCL takes both; gloo neither.
    """
    dist: Any = torch.distributed
    exchange, gather, scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    def exchange_lists(output: Any, input: Any, output_splits: Any = None, input_splits: Any = None, **how: Any) -> Any:
        output_splits, input_splits = (
            sizes.tolist() if torch.is_tensor(sizes) else sizes
            for sizes in (how.pop("output_split_sizes", output_splits), how.pop("input_split_sizes", input_splits))
        )
        return exchange(output, input, output_splits, input_splits, **how)

    def gather_unequal(outputs: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, tensor, group, async_op)
        outputs[dist.get_rank(group)].copy_(tensor)
        for rank, output in enumerate(outputs):
            if output.numel():
                dist.broadcast(output, group=group, group_src=rank)

    def scatter_unequal(output: Any, inputs: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **how: Any) -> Any:
        if len({part.shape for part in inputs}) == 1:
            return scatter(output, inputs, op, group, **how)
        for rank, part in enumerate(inputs):
            if part.numel():
                dist.reduce(summed := part.clone(), op=op, group=group, group_dst=rank)
                if rank == dist.get_rank(group):
                    output.copy_(summed)

    dist.all_to_all_single = exchange_lists
    dist.all_gather, dist.reduce_scatter = gather_unequal, scatter_unequal
