"""Files and keys of a ``torch_dist`` checkpoint, as megatron-core 0.16 names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMMON = "common.pt"
FORMAT = "metadata.json"
METADATA = ".metadata"

_STACK = re.compile(r"^(?P<stack>decoder\.layers\.)(?!\d+\.)(?P<weight>.+)$")
_LAYER = re.compile(r"^(?P<stack>decoder\.layers\.)(?P<layer>\d{1,6})\.(?P<weight>.+)$")
# The layer inside a multi-token-prediction module is never stacked with others.
_MTP_LAYER = re.compile(r"^(?P<prefix>mtp\.layers\.\d+\.transformer_layer\.)(?P<weight>.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(?P<expert>\d{1,7})\.(?P<weight>.+)$")
# On disk a norm before a linear layer has the name that Transformer Engine's fused layer gives it, so that checkpoints
# of both kinds of model are the same (`sharded_state_dict_keys_map` in megatron-core).
_FUSED_NORMS = {
    "input_layernorm.": ("self_attention.linear_qkv.layer_norm_", "self_attention.in_proj.layer_norm_"),
    "pre_mlp_layernorm.": ("mlp.linear_fc1.layer_norm_",),
}
# The same for latent attention, whose local layers keep their own names on disk; and Megatron-Bridge's further norms.
_OTHER_NORMS = {
    "self_attention.q_layernorm.": ("self_attention.linear_q_up_proj.layer_norm_",),
    "self_attention.kv_layernorm.": ("self_attention.linear_kv_up_proj.layer_norm_",),
    "post_self_attn_layernorm.": ("self_attention.linear_proj.post_layernorm.",),
    "post_mlp_layernorm.": ("mlp.linear_fc2.post_layernorm.",),
}
# Sections of a weight that are stored under separate keys (megatron-core's GatedDeltaNet).
_SECTIONS = {
    "self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "self_attention.conv1d.weight": ("query", "key", "value"),
}


@dataclass(frozen=True)
class StoredPlace:
    """A place of a weight in a checkpoint: the tensors that make it up, joined along the first dimension; nearly always
    one. ``layer`` and ``expert`` are indices on their leading axes, if they have them."""

    keys: tuple[str, ...]
    layer: int | None
    expert: int | None = None

    @property
    def index(self) -> tuple[int, ...]:
        """Indices on the leading axes that the tensors have."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)


def places(name: str) -> list[StoredPlace]:
    """Places where a weight of megatron-core's ``GPTModel`` of local layers may lie, first that of stacked layers."""
    if match := _LAYER.match(name):
        stack, layer, weight = match["stack"], int(match["layer"]), match["weight"]
        return _places_in_layer(stack, layer, weight) + _places_in_layer(f"{stack}{layer}.", None, weight)
    if match := _MTP_LAYER.match(name):
        return _places_in_layer(match["prefix"], None, match["weight"])
    return [StoredPlace((name,), None)]


def stacked(name: str) -> tuple[str, int | None]:
    """The key under which a weight of equal layers is stacked, and its layer; for any other weight, its name."""
    match = _LAYER.match(name)
    return (match["stack"] + match["weight"], int(match["layer"])) if match else (name, None)


def _places_in_layer(prefix: str, layer: int | None, weight: str) -> list[StoredPlace]:
    """Places where a layer's weight may lie: stacked with other layers' (``layer`` is then its index), or alone.

    Sequential and grouped experts share a key with an axis of experts, or each expert has separate keys. Where nothing
    is stacked, an MLP's gate and up projections may be stored separately.
    """
    if match := _EXPERT.match(weight):
        number, weight = int(match["expert"]), match["weight"]
        found = [StoredPlace((f"{prefix}mlp.experts.experts.{weight}",), layer, number)]
        key = f"{prefix}mlp.experts.experts.{number}.{weight}"
        found += [StoredPlace((key,), None)] if layer is None else []
    else:
        key = prefix + weight
        found = [StoredPlace((prefix + spelling,), layer) for spelling in _spellings(weight)]
    if weight in _SECTIONS:
        found.append(StoredPlace(tuple(f"{prefix}{weight}.{name}" for name in _SECTIONS[weight]), layer))
    if layer is None and weight.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        found.append(StoredPlace((f"{key}_w", f"{key}_v"), None))
    return found


def _spellings(weight: str) -> list[str]:
    for norm, fused in _FUSED_NORMS.items():
        if weight.startswith(norm):
            return [*(name + weight.removeprefix(norm) for name in fused), weight]
    for norm, others in _OTHER_NORMS.items():
        if weight.startswith(norm):
            return [weight, *(name + weight.removeprefix(norm) for name in others)]
    return [weight]


def other_names(key: str) -> list[str]:
    """Other keys of a norm: it may be stored twice, so that models with either kind of layers find it."""
    for norm, others in (_FUSED_NORMS | _OTHER_NORMS).items():
        prefix, found, weight = key.rpartition(f".{norm}")
        if found:
            return [f"{prefix}.{name}{weight}" for name in others]
    return []


def layers_under(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, as :func:`places` takes them, and shapes of the layers stacked in a tensor on disk, or of it alone."""
    match = _STACK.match(key)
    if match is None or 0 in shape or not shape:
        yield key, shape
        return
    for layer in range(shape[0]):
        yield f"{match['stack']}{layer}.{match['weight']}", shape[1:]


def is_optimizer(key: str) -> bool:
    """Whether a key on disk is optimizer state, such as ``optimizer.state.exp_avg.…`` and ``chained_0.optimizer.…``."""
    return key.startswith(("optimizer.", "chained_")) or ".optimizer." in key
