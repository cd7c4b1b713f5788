"""Files and keys of a ``torch_dist`` checkpoint, as megatron-core 0.16 names them. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_convert.errors import CheckpointError

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
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<weight>.+)$")
# On disk a norm before a linear layer has the name that Transformer Engine's fused layer gives it,
# so that checkpoints of both kinds of model are the same (`sharded_state_dict_keys_map` in megatron-core).
_FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
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
    match = _LAYER.match(name)
    if match is None:
        return [Place((name,), None)]
    stack, layer, weight = match["stack"], int(match["layer"]), match["weight"]
    if expert := _EXPERT.match(weight):
        return _expert_places(stack, layer, int(expert["expert"]), expert["weight"])
    spellings = [weight]
    for norm, fused in _FUSED_NORMS.items():
        if weight.startswith(norm):
            spellings.insert(0, fused + weight.removeprefix(norm))
    stacked = [Place((stack + spelling,), layer) for spelling in spellings]
    single = [Place((f"{stack}{layer}.{spelling}",), None) for spelling in spellings]
    if weight == "mlp.linear_fc1.weight":
        # Models with unequal layers may keep the MLP's gate and up projections apart.
        single.append(_apart(f"{stack}{layer}.{weight}"))
    return stacked + single


def _expert_places(stack: str, layer: int, expert: int, weight: str) -> list[Place]:
    """Sequential and grouped experts share a key with an axis of experts, or each expert has keys of its own."""
    single = f"{stack}{layer}.mlp.experts.experts.{expert}.{weight}"
    return [
        Place((f"{stack}mlp.experts.experts.{weight}",), layer, expert),
        Place((f"{stack}{layer}.mlp.experts.experts.{weight}",), None, expert),
        Place((single,), None),
        *([_apart(single)] if weight == "linear_fc1.weight" else []),
    ]


def _apart(key: str) -> Place:
    return Place((f"{key}_w", f"{key}_v"), None)


def find_iteration(directory: str | Path) -> Path:
    """The directory that holds ``.metadata``.

    Args:
        directory: A checkpoint (its tracker names the iteration), or one iteration of it.

    Raises:
        CheckpointError: It is neither.
    """
    path = Path(directory)
    if (path / METADATA).is_file():
        return path
    advice = (
        f"give a torch_dist checkpoint ({TRACKER} with release/ or iter_*/) or one iteration of it; "
        "megatron-to-hf reads the legacy format too"
    )
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}; {advice}")
    try:
        tracked = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(
            f"{path} is no torch_dist checkpoint: it has no {METADATA} and no {TRACKER}; {advice}"
        ) from None
    found = path / (f"iter_{int(tracked):07d}" if tracked.isdigit() else tracked)
    if tracked != RELEASE and not tracked.isdigit():
        raise CheckpointError(f"{path / TRACKER} holds {tracked!r}; it must be {RELEASE!r} or a number; {advice}")
    if not (found / METADATA).is_file():
        raise CheckpointError(f"{path / TRACKER} names {found.name}, but {found / METADATA} is missing; {advice}")
    return found


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


def read_format(iteration: Path) -> None:
    """Refuse an iteration whose ``metadata.json`` names another format.

    Raises:
        CheckpointError: It does, or cannot be read.
    """
    path = iteration / FORMAT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path} ({error!r}); use a complete torch_dist checkpoint") from error
    if found != "torch_dist":
        raise CheckpointError(f"{iteration} has format {found!r}; allowed: 'torch_dist'; save it with torch_dist")
