"""Send the weights to the engines, under their Hugging Face names."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_core.errors import SlimeError
from slime_core.interfaces import WeightChannel
from slime_core.types import SyncReport, WeightUpdate
from slime_megatron.model import PackedGPT

NamedTensor = tuple[str, torch.Tensor]


def push_weights(
    model: PackedGPT, shape: ModelShape, channel: WeightChannel, update: WeightUpdate, buffer_size: int
) -> SyncReport:
    """Gather every weight over the tensor-parallel ranks and send it from rank 0, bucket by bucket.

    Every rank calls this. Those of rank 0's model gather, only rank 0 uses ``channel``, and the other data-parallel
    replicas, which have the same weights, do nothing. Where sending fails, rank 0 still gathers to the end: the others
    do not wait for it for ever, and the weights can be sent again.

    A tensor of more than ``buffer_size`` bytes makes a bucket of its own. The other replicas report that nothing was
    sent.
    """
    if parallel_state.get_data_parallel_rank() != 0:
        return SyncReport(version=update.version, tensors=0, bytes=0, seconds=0.0)
    start = time.perf_counter()
    sends = dist.get_rank() == 0
    tensors = total = 0
    buckets = _buckets(full_weights(model, shape), buffer_size)
    try:
        if sends:
            channel.begin(update)
        for bucket in buckets:
            tensors += len(bucket)
            total += sum(tensor.nbytes for _, tensor in bucket)
            if sends:
                channel.send(bucket)
        if sends:
            channel.end()
    except SlimeError:
        collections.deque(buckets, maxlen=0)  # goes through all that is left
        raise
    return SyncReport(version=update.version, tensors=tensors, bytes=total, seconds=time.perf_counter() - start)


def full_weights(model: PackedGPT, shape: ModelShape) -> Iterator[NamedTensor]:
    """Every weight, whole and under its Hugging Face name. The tensor-parallel ranks must go through it together."""
    weight_map = WeightMap(shape)
    group = parallel_state.get_tensor_model_parallel_group()
    for name, param in model.named_parameters():
        local = param.detach()
        if getattr(param, "tensor_model_parallel", False) and group.size() > 1:
            shards = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(shards, local.contiguous(), group=group)
            local = weight_map.merge_tp(name, shards)
        yield from weight_map.to_hf(name, local)


def _buckets(tensors: Iterator[NamedTensor], buffer_size: int) -> Iterator[list[NamedTensor]]:
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > buffer_size:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
