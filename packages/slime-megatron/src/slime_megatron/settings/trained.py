"""Which weights train, by name. No torch here.

Names are Megatron's, with layers and experts numbered in the whole model, as in
:func:`slime_megatron.model.build.named_weights` and :class:`slime_convert.mapping.WeightMap`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime_convert.mapping import weight_map
from slime_convert.shape import ModelShape

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Selection:
    """Weights chosen by regular expressions that are searched in their names: ``only`` those, or all but ``frozen``.

    Prediction modules and the routers' biases never train.
    """

    only: tuple[str, ...] | None = None
    frozen: tuple[str, ...] | None = None

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer changes a weight."""
        if name.startswith("mtp.") or name.endswith(".expert_bias"):
            return False
        return _matches(self.only, name) if self.only is not None else not _matches(self.frozen or (), name)

    def freeze(self, weights: Iterable[tuple[str, Any]], *, tied: bool) -> None:
        """Take from every weight that does not train its gradient, and with it its part in Megatron's optimizer.

        ``tied`` is for a last stage whose output layer is a copy of the first stage's embedding, and goes by its name.
        """
        for name, weight in weights:
            if weight.requires_grad:
                weight.requires_grad_(self.is_trained(_EMBEDDING if tied and name == _OUTPUT else name))

    def contradictions(self) -> Iterator[str]:
        """Problems with any model; a line each."""
        given = dict(self._given())
        for flag, patterns in given.items():
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"{flag} {pattern} is an invalid regular expression ({error}); escape characters with \\"
        if len(given) > 1:
            yield f"{' and '.join(given)} each say which weights train; give one of them"

    def misfits(self, shape: ModelShape) -> Iterator[str]:
        """Problems with a model; a line each."""
        for flag, patterns in self._given():
            names = list(weight_map(shape).megatron_names())
            unmatched = [pattern for pattern in patterns if not _matches([pattern], *names)]
            for pattern in unmatched:
                yield (
                    f"{flag} {pattern} matches no weight of the model; {near_names(pattern, names)}patterns are "
                    f"searched in names such as {names[1]}"
                )
            if not unmatched and not any(map(self.is_trained, names)):
                yield f"{flag} {' '.join(patterns)} leaves no weight to train; leave some out"

    def _given(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        if self.only is not None:
            yield "--only-train-params-name-list", self.only
        if self.frozen is not None:
            yield "--freeze-params-name-list", self.frozen


def near_names(given: str, names: Iterable[str]) -> str:
    """Parts of names that look like what was given, as the beginning of a sentence; nothing if none does."""
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdecimal())
    near = difflib.get_close_matches(given, parts, n=3)
    return f"near names: {', '.join(near)}; " if near else ""


def _matches(patterns: Sequence[str], *names: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


# Linear layers of the transformer layers, of the families that are trained.
_LINEAR = tuple(
    f"linear_{part}"
    for part in ("qkv", "proj", "fc1", "fc2", "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
)


@dataclass(frozen=True)
class Lora:
    """Which layers get LoRA adapters, and of what size.

    ``targets`` are ends of layers' names, such as ``linear_qkv`` or ``shared_experts.linear_fc1``, or Hugging Face's
    last words (all of a fused layer's). ``None`` is every linear layer but those of routed experts.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    def saved(self) -> dict[str, Any]:
        """As checkpoints hold it."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}

    def weights(self, shape: ModelShape) -> list[str]:
        """The weights whose layers get adapters."""
        linear, parts = _linear_weights(shape), _hf_parts(shape)
        if self.targets is None:
            return [name for name in linear if ".local_experts." not in name]
        ends = [layer for layer, words in parts.items() if words <= set(self.targets)] + list(self.targets)
        return [name for name in linear if any(name.endswith(f".{end}.weight") for end in ends)]

    def misfits(self, shape: ModelShape) -> Iterator[str]:
        """Problems with a model; a line each."""
        linear, parts = _linear_weights(shape), _hf_parts(shape)
        for target in self.targets or ():
            holders = {layer: words for layer, words in parts.items() if target in words}
            for layer, words in holders.items():
                if missing := sorted(words - set(self.targets or ())):
                    yield (
                        f"--lora-target-modules {target} is a part of {layer}, which gets one adapter; give "
                        f"{', '.join(missing)} too, or {layer}"
                    )
            if not holders and not any(name.endswith(f".{target}.weight") for name in linear):
                yield (
                    f"--lora-target-modules {target} matches no linear layer of the model; "
                    f"{near_names(target, [*linear, *(word for words in parts.values() for word in words)])}allowed: "
                    f"{', '.join(parts)}"
                )


def _linear_weights(shape: ModelShape) -> list[str]:
    """The weights of the layers that can get adapters."""
    names = (name for name in weight_map(shape).megatron_names() if name.startswith("decoder."))
    return [name for name in names if name.endswith(tuple(f".{layer}.weight" for layer in _LINEAR))]


def _hf_parts(shape: ModelShape) -> dict[str, set[str]]:
    """The last words of the Hugging Face layers that lie in a layer, by Megatron's last word."""
    weights, found = weight_map(shape), dict[str, set[str]]()
    for name in _linear_weights(shape):
        words = {part.split(".")[-2] for part in weights.hf_parts(name)}
        found.setdefault(name.split(".")[-2], set()).update(words)
    return found
