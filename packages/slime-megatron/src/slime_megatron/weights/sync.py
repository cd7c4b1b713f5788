"""Send the weights to the engines, under their Hugging Face names."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_convert.errors import ConvertError
from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_convert.stored_form import StoredForm
from slime_core.errors import SlimeError
from slime_core.interfaces import WeightChannel
from slime_core.types import SyncReport, WeightUpdate
from slime_megatron.model.build import Chunks, named_weights
from slime_megatron.model.lora import FACTORS, adapted_layers
from slime_megatron.model.parts import VALUE_HEAD
from slime_megatron.ranks.exchange import gather_values

NamedTensor = tuple[str, torch.Tensor]
_Local = tuple[str, str, torch.Tensor, bool]
"""A tensor's name, that of the weight it belongs to, this rank's part, and whether other ranks have other parts."""
_Described = tuple[str, list[int], str]  # name, shape and type of a weight


class WeightExport:
    """Brings every weight of a model to one rank, whole, one after the other; all ranks make one together.

    A weight is merged over its tensor-parallel ranks by the first replica that has it, and sent to that rank, the
    root, from where it is: another pipeline stage, another rank of experts. Nobody holds more than one whole weight for
    it at a time. Weights come with LoRA adapters merged in; with ``adapters``, only these come, under PEFT's names.
    """

    def __init__(self, model: Chunks, shape: ModelShape, *, adapters: bool = False) -> None:
        # Going through a model's modules takes a tenth as long as copying its weights.
        self._named = list(named_weights(model))
        self._adapted = list(adapted_layers(model))
        self._map = WeightMap(shape)
        self._adapters = adapters
        self._kept: list[list[list[_Described]]] = []
        for experts in (False, True):
            whole = self._whole_weights(experts, meta=True)
            own = [(name, weight.shape, str(weight.dtype)) for name, weight in whole if weight is not None]
            self._kept.append(gather_values(own))

    def tensors(self, root: int = 0) -> Iterator[NamedTensor]:
        """On ``root``, every weight under its Hugging Face name. All ranks must go through it; others yield nothing.

        Experts come last: a rank may have merged its other weights with the root, and its experts alone.
        """
        for experts in (False, True):
            for name, whole in self._whole_weights(experts):
                if whole is not None and dist.get_rank() == root:
                    yield from self._hugging_face(name, whole)
                elif whole is not None:
                    dist.send(whole.contiguous(), root)
            if dist.get_rank() == root:
                yield from self._received(self._kept[experts], root)

    def mismatches(self) -> list[str]:
        """Weights, by Megatron's names, that :meth:`tensors` does not give as they are.

        What is merged is split again and compared with this rank's part; what is translated, is translated back as a
        checkpoint is loaded. All ranks call it.
        """
        return [
            name
            for experts in (False, True)
            for name, weight, local, is_split in self._local_weights(False)
            if ("local_experts" in name) == experts
            and name != VALUE_HEAD
            and not self._comes_back(weight, local, tensor_group(experts) if is_split else None)
        ]

    def _comes_back(self, weight: str, local: torch.Tensor, group: Any | None) -> bool:
        whole, size = local, 1 if group is None else group.size()
        if group is not None and size > 1:
            shards = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(shards, local.contiguous(), group=group)
        try:
            if group is not None and size > 1:
                whole = self._map.merge_tp(weight, shards)
                if not torch.equal(self._map.split_tp(weight, whole, size)[group.rank()], local):
                    return False
            parts = dict(self._map.to_hf(weight, whole))
            back = self._map.from_hf(weight, parts.__getitem__)
            return torch.equal(back, self._map.padded(weight, whole))
        except (ConvertError, RuntimeError):  # of another shape
            return False

    def _hugging_face(self, name: str, whole: torch.Tensor) -> Iterator[NamedTensor]:
        """A weight as Hugging Face has it; a value head is that of a sequence classifier with one class."""
        if self._adapters:
            yield from self._peft(name, whole)
        elif name == VALUE_HEAD:
            yield "score.weight", whole
        else:
            yield from self._map.to_hf(name, whole)

    def _received(self, kept: list[list[_Described]], root: int) -> Iterator[NamedTensor]:
        for source, described in enumerate(kept):
            for name, lengths, type_name in described if source != root else ():
                dtype: torch.dtype = getattr(torch, type_name.removeprefix("torch."))
                weight = torch.empty(lengths, dtype=dtype, device=torch.cuda.current_device())
                dist.recv(weight, source)
                yield from self._hugging_face(name, weight)

    def _whole_weights(self, experts: bool, *, meta: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        """This rank's weights, merged; ``None`` where another rank has the same. With ``meta``, shapes alone."""
        for name, weight, local, is_split in self._factors() if self._adapters else self._local_weights(meta):
            if ("local_experts" in name) != experts or _replica(experts):
                continue
            group = tensor_group(experts)
            if group.size() > 1 and is_split:
                shards = [torch.empty_like(local, device="meta" if meta else None) for _ in range(group.size())]
                if not meta:
                    dist.all_gather(shards, local.contiguous(), group=group)
                local = self._map.merge_tp(weight, shards)
            yield name, local if group.rank() == 0 else None

    def _local_weights(self, meta: bool) -> Iterator[_Local]:
        layers = {weight: layer for _, weight, layer in self._adapted}
        tied = not self._map.shape.untie_embeddings_and_output_weights
        for name, weight in self._named:
            if tied and name == "output_layer.weight":  # a last stage's copy of the embedding
                continue
            is_split = "local_experts" in name or getattr(weight, "tensor_model_parallel", False)
            merge = weight in layers and not meta
            yield name, name, layers[weight].merged_weight().detach() if merge else weight.detach(), is_split

    def _factors(self) -> Iterator[_Local]:
        for name, _, layer in self._adapted:
            for factor in FACTORS:
                local = getattr(layer, factor).detach()
                yield f"{name.removesuffix('weight')}{factor}", name, local, factor == layer.split_factor

    def _peft(self, name: str, whole: torch.Tensor) -> list[NamedTensor]:
        layer, _, factor = name.rpartition(".")
        weight = f"{layer}.weight"
        parts = self._map.hf_parts(weight)
        cut = self._map.cut_rows(weight, whole) if factor == "lora_B" else [whole] * len(parts)
        modules = (part.removesuffix(".weight") for part in parts)
        return [(f"base_model.model.{part}.{factor}.weight", own) for part, own in zip(modules, cut, strict=True)]


def _replica(experts: bool) -> int:
    """0 for the first of the ranks that hold the same part of a weight."""
    if experts:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def tensor_group(experts: bool) -> Any:
    """The ranks that share a dense weight, or one of the experts'."""
    if experts:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def push_weights(
    export: WeightExport,
    channel: WeightChannel | None,
    update: WeightUpdate,
    buffer_size: int,
    form: StoredForm | None = None,
    senders: Sequence[int] = (0,),
) -> SyncReport:
    """Gather every weight on each of ``senders`` in turn, and send it from there through that rank's ``channel``.

    Every rank calls this. Where sending fails, the rank still gathers to the end, and for the senders after it: the
    others do not wait for it for ever, and the weights can be sent again. A tensor of more than ``buffer_size`` bytes
    makes a bucket of its own. Ranks that do not send report that nothing was sent. With ``form``, weights are sent as a
    quantized model stores them.
    """
    start, sent = time.perf_counter(), (0, 0)
    failure: SlimeError | ConvertError | None = None
    for root in senders:
        gathered = export.tensors(root)
        if dist.get_rank() != root:
            collections.deque(gathered, maxlen=0)
            continue
        if channel is None:
            raise RuntimeError(f"rank {root} is to send weights and has no channel")
        try:
            sent = _send(gathered if form is None else _in_form(gathered, form), channel, update, buffer_size)
        except (SlimeError, ConvertError) as error:
            failure = error
            collections.deque(gathered, maxlen=0)  # goes through all that is left
    if failure is not None:
        raise failure
    seconds = time.perf_counter() - start if dist.get_rank() in senders else 0.0
    return SyncReport(version=update.version, tensors=sent[0], bytes=sent[1], seconds=seconds)


def _send(
    tensors: Iterator[NamedTensor], channel: WeightChannel, update: WeightUpdate, buffer_size: int
) -> tuple[int, int]:
    """Send tensors bucket by bucket; while one is sent, the next is gathered. Their number, and the bytes sent."""
    count = total = 0
    sending: Future[int] | None = None
    # Which device is the current one is a setting of each thread.
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(1, "send-weights", torch.cuda.set_device, (device,)) as sender:
        channel.begin(update)
        for bucket in _buckets(tensors, buffer_size):
            count += len(bucket)
            if sending is not None:
                total += sending.result()
            sending = sender.submit(channel.send, bucket)
        if sending is not None:
            total += sending.result()
        channel.end()
    return count, total


def _in_form(tensors: Iterator[NamedTensor], form: StoredForm) -> Iterator[NamedTensor]:
    for name, tensor in tensors:
        yield from form.tensors(name, tensor)


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
