"""What goes wrong with weights on their way: channels that change what they send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from slime_core.types import WeightUpdate
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.weights import TensorWeightChannel

if TYPE_CHECKING:
    from slime_megatron.worker import MegatronWorker

Named = tuple[str, torch.Tensor]
Fault = Callable[[list[Named]], list[Named]]


@dataclasses.dataclass
class FaultyChannel:
    """Passes on to ``channel`` what a fault makes of the tensors."""

    channel: Any
    fault: str

    def begin(self, update: WeightUpdate) -> None:
        self._held: list[Named] = []
        self.channel.begin(update)

    def send(self, bucket: list[Named]) -> int:
        self._held += [(name, tensor.clone()) for name, tensor in bucket]
        return 0

    def end(self) -> dict[str, str]:
        sent = FAULTS[self.fault][1](self._held)
        self.channel.send([(name, tensor.contiguous()) for name, tensor in sent])
        return dict(self.channel.end())

    def close(self) -> None:
        self.channel.close()


class DamagingChannel(TensorWeightChannel):
    """What engines get of one tensor is twice what the channel is given, and compares with what they hold."""

    def __init__(self, spec: ChannelSpec, damaged: str) -> None:
        super().__init__(spec)
        self.damaged = damaged

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spec, self.damaged)

    def _send(self, bucket: Any) -> int:
        return super()._send([(name, tensor * 2 if name == self.damaged else tensor) for name, tensor in bucket])


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """One tensor is another."""
    return lambda tensors: [(own, change(one) if own == name else one) for own, one in tensors]


def left_out(beginning: str) -> Fault:
    """Tensors whose names begin so are not sent."""
    return lambda tensors: [(name, one) for name, one in tensors if not name.startswith(beginning)]


def swapped(one: str, other: str) -> Fault:
    """Two tensors under each other's name."""
    names = {one: other, other: one}
    return lambda tensors: [(names.get(name, name), tensor) for name, tensor in tensors]


def taken_from(name: str, source: str) -> Fault:
    """One tensor in the place of another, too."""

    def fault(tensors: list[Named]) -> list[Named]:
        found = dict(tensors)
        return [(own, found[source] if own == name else one) for own, one in tensors]

    return fault


def _halves(tensor: torch.Tensor, dim: int, order: tuple[int, int]) -> torch.Tensor:
    parts = tensor.chunk(2, dim)
    return torch.cat([parts[place] for place in order], dim)


def _first_not_a_number(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = float("nan")
    return tensor


def _rolled_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(4, 16, -1).roll(1, 0).reshape_as(tensor)


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, 0)


_FIRST, _LAST = "model.layers.0.self_attn.", "model.layers.1."
_Q, _K, _V, _OUT = (f"{_FIRST}{part}_proj.weight" for part in "qkvo")
_LAST_OUT, _GATE, _EMBEDDING = f"{_LAST}self_attn.o_proj.weight", f"{_LAST}mlp.gate.weight", "model.embed_tokens.weight"
_EXPERTS = f"{_LAST}mlp.experts."
_QKV, _W13 = "layers.0.self_attn.qkv_proj.weight", "layers.1.mlp.experts.w13_weight"
FAULTS: dict[str, tuple[str, Fault]] = {
    "a shard is missing": (_OUT, left_out(_OUT)),
    "a tensor arrives as zeros": (_OUT, changed(_OUT, torch.zeros_like)),
    "a part is transposed": (_QKV, changed(_Q, torch.t)),
    "keys and values change places": (_QKV, swapped(_K, _V)),
    "a part has the other sign": (_QKV, changed(_V, torch.neg)),
    "heads are in another order": (_QKV, changed(_Q, _rolled_heads)),
    "a shard of tensor parallelism is there twice": (_QKV, changed(_Q, lambda one: _halves(one, 0, (0, 0)))),
    "shards of columns are in another order": (_OUT, changed(_OUT, lambda one: _halves(one, 1, (1, 0)))),
    "two norms change places": (f"{_FIRST}q_norm.weight", swapped(f"{_FIRST}q_norm.weight", f"{_FIRST}k_norm.weight")),
    "a norm is not updated": (f"{_LAST}input_layernorm.weight", left_out(f"{_LAST}input_layernorm")),
    "a layer is another's": (_LAST_OUT, taken_from(_LAST_OUT, _OUT)),
    "a scale is dropped": (_LAST_OUT, changed(_LAST_OUT, lambda one: one * 2)),
    "two experts change places": (_W13, swapped(f"{_EXPERTS}3.gate_proj.weight", f"{_EXPERTS}5.gate_proj.weight")),
    "gate and up change places": (_W13, swapped(f"{_EXPERTS}5.gate_proj.weight", f"{_EXPERTS}5.up_proj.weight")),
    "an expert is missing": (f"{_EXPERTS}w2_weight", left_out(f"{_EXPERTS}5.down_proj")),
    "the router's rows are shifted": (_GATE, changed(_GATE, _rolled)),
    "the embedding's rows are shifted": (_EMBEDDING, changed(_EMBEDDING, _rolled)),
    "the head is not updated": ("lm_head.weight", left_out("lm_head")),
    "a number is not finite": (_OUT, changed(_OUT, _first_not_a_number)),
    "all weights are stale": ("", left_out("")),
}
"""What goes wrong: a part of the engine's name of the weight that is wrong, and what happens to what is sent."""


def double_a_shard(worker: MegatronWorker, weight: str) -> None:
    """From here on the trainer gathers the first tensor-parallel shard of a weight in the place of all."""
    export = worker_export(worker)
    merge = export._map.merge_tp
    export._map.merge_tp = lambda name, shards: merge(name, [shards[0]] * len(shards) if name == weight else shards)


def mend(worker: MegatronWorker) -> None:
    """Undo :func:`double_a_shard`."""
    del worker_export(worker)._map.merge_tp


def worker_export(worker: MegatronWorker) -> Any:
    assert worker._export._weights is not None
    return worker._export._weights
