"""Files and keys of a ``torch_dist`` checkpoint, as megatron-core 0.16 names them. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMMON = "common.pt"
FORMAT = "metadata.json"
METADATA = ".metadata"
FORMAT_RECORD = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_LAYER = re.compile(r"^(?P<stack>decoder\.layers\.)(?P<layer>\d+)\.(?P<weight>.+)$")
# The layer inside a multi-token-prediction module is never stacked with others.
_MTP_LAYER = re.compile(r"^(?P<prefix>mtp\.layers\.\d+\.transformer_layer\.)(?P<weight>.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<weight>.+)$")
# On disk a norm before a linear layer has the name that Transformer Engine's fused layer gives it,
# so that checkpoints of both kinds of model are the same (`sharded_state_dict_keys_map` in megatron-core).
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# The same for latent attention, where local layers keep their own names on disk.
_FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


@dataclass(frozen=True)
class Place:
    """Where a weight lies in a checkpoint.

    Attributes:
        keys: Keys of the tensors that make it up, joined along the first dimension; nearly always one.
        layer: Index on the tensors' leading layer axis; ``None`` if they have no such axis.
        expert: Index on their axis of experts, which comes next; ``None`` if they have no such axis.
    """

    keys: tuple[str, ...]
    layer: int | None
    expert: int | None = None

    @property
    def index(self) -> tuple[int, ...]:
        """Indices on the leading axes that the tensors have."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)


def places(name: str) -> list[Place]:
    """Where a weight of this name may lie; the first is where megatron-core puts it for equal layers.

    Args:
        name: Of megatron-core's ``GPTModel`` with local layers.
    """
    if match := _LAYER.match(name):
        stack, layer = match["stack"], int(match["layer"])
        found = [(f"{stack}", layer), (f"{stack}{layer}.", None)]
        return [place for prefix, index in found for place in _places_in_layer(prefix, index, match["weight"])]
    if match := _MTP_LAYER.match(name):
        return _places_in_layer(match["prefix"], None, match["weight"])
    return [Place((name,), None)]


def stacked(name: str) -> tuple[str, int | None]:
    """The key under which a weight of equal layers is stacked, and its layer; of any other weight the name alone."""
    match = _LAYER.match(name)
    return (match["stack"] + match["weight"], int(match["layer"])) if match else (name, None)


def _places_in_layer(prefix: str, layer: int | None, weight: str) -> list[Place]:
    """Where a layer's weight may lie: stacked with other layers' (``layer`` is then its index), or alone.

    Sequential and grouped experts share a key with an axis of experts, or each expert has keys of its own. Where
    nothing is stacked, an MLP's gate and up projections may lie apart.
    """
    if match := _EXPERT.match(weight):
        number, weight = int(match["expert"]), match["weight"]
        found = [Place((f"{prefix}mlp.experts.experts.{weight}",), layer, number)]
        key = f"{prefix}mlp.experts.experts.{number}.{weight}"
        found += [Place((key,), None)] if layer is None else []
    else:
        key = prefix + weight
        found = [Place((prefix + spelling,), layer) for spelling in _spellings(weight)]
    return found + ([_apart(key)] if layer is None and weight.endswith("linear_fc1.weight") else [])


def _spellings(weight: str) -> list[str]:
    spellings = [weight]
    for norm, fused in _FUSED_NORMS.items():
        if weight.startswith(norm):
            spellings.insert(0, fused + weight.removeprefix(norm))
    for norm, fused in _FUSED_LATENT_NORMS.items():
        if weight.startswith(norm):
            spellings.append(fused + weight.removeprefix(norm))
    return spellings


def _apart(key: str) -> Place:
    return Place((f"{key}_w", f"{key}_v"), None)


def fused_name(key: str) -> str | None:
    """The key under which Transformer Engine's layers look for what lies under ``key``; ``None`` if it is the same.

    A norm may lie under both, so that a model of either kind of layers finds it.
    """
    for norm, fused in (_FUSED_NORMS | _FUSED_LATENT_NORMS).items():
        prefix, found, weight = key.rpartition(f".{norm}")
        if found:
            return f"{prefix}.{fused}{weight}"
    return None


_STACK = re.compile(r"^(?P<stack>decoder\.layers\.)(?!\d+\.)(?P<weight>.+)$")


def layers_under(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The layers that lie under one key.

    Args:
        key: Of a tensor on disk.
        shape: Of that tensor.

    Yields:
        Names that :func:`places` understands, and the shape of what lies there: of each layer, or of all of it.
    """
    match = _STACK.match(key)
    if match is None or not shape:
        yield key, shape
        return
    for layer in range(shape[0]):
        yield f"{match['stack']}{layer}.{match['weight']}", shape[1:]


def is_optimizer(key: str) -> bool:
    """Whether a key on disk is optimizer state, such as ``optimizer.state.exp_avg.…`` and ``chained_0.optimizer.…``."""
    return key.startswith(("optimizer.", "chained_")) or ".optimizer." in key
