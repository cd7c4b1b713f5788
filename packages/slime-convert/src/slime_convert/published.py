"""Published models whose shape flags can be printed; ``published.json`` has an entry for each shape."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError
from slime_convert.progress import aligned
from slime_convert.shape import ModelShape


@dataclass(frozen=True)
class PublishedModel:
    """A published shape: its models, as their makers name them, and what it depends on of their ``config.json``.

    ``max_position_embeddings`` may differ between them.
    """

    models: str
    config: Mapping[str, Any]

    @property
    def shape(self) -> ModelShape:
        """The shape that the config describes."""
        return ModelShape.from_hf_config(self.config)


PUBLISHED: Mapping[str, PublishedModel] = {
    name: PublishedModel(**entry)
    for name, entry in json.loads(files("slime_convert").joinpath("published.json").read_text("utf-8")).items()
}
"""Published shapes by the name of their file in ``scripts/models``."""


def published_config(model: str) -> Mapping[str, Any] | None:
    """The config of a published model, by a name of :data:`PUBLISHED`, its maker's or the Hub's; ``None`` if unknown.

    Letters may be large or small: ``qwen3-4B``, ``Qwen3-4B`` and ``Qwen/Qwen3-4B`` are one.
    """
    plain = model.rpartition("/")[2].casefold()
    for name, entry in PUBLISHED.items():
        if plain in (name.casefold(), *entry.models.casefold().split(", ")):
            return entry.config
    return None


def nearest_published(model: str) -> str | None:
    """The name of :data:`PUBLISHED` that is most like a name, or that a name on the Hub begins with, or ``None``.

    ``Qwen3-30B-A3`` and ``Qwen/Qwen3-30B-A3B-Instruct`` mean ``qwen3-30B-A3B``.
    """
    owner, _, plain = model.casefold().rpartition("/")
    names = {one.casefold(): name for name, entry in PUBLISHED.items() for one in (name, *entry.models.split(", "))}
    begins = [one for one in names if plain.startswith(f"{one}-")] if owner else []
    near = [max(begins, key=len)] if begins else difflib.get_close_matches(plain, names, n=1, cutoff=0.8)
    return names[near[0]] if near else None


_HEADER = ("name", "family", "layers", "hidden", "ffn", "heads", "groups", "experts", "vocab", "rope base", "models")


def model_table() -> str:
    """One line per published shape under a header, in columns."""
    rows = [_HEADER, *(_row(name, entry) for name, entry in PUBLISHED.items())]
    return aligned(rows, numbers=range(2, len(_HEADER) - 1))


def _row(name: str, entry: PublishedModel) -> tuple[str, ...]:
    shape = entry.shape
    sizes = (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size, shape.num_attention_heads)
    groups = "MLA" if shape.multi_latent_attention else str(shape.num_query_groups)
    experts = "-" if shape.num_experts is None else f"{shape.moe_router_topk}/{shape.num_experts}"
    last = str(shape.vocab_size), str(int(shape.rotary_base)), entry.models
    return (name, shape.family, *map(str, sizes), groups, experts, *last)


def flags_text(model: str) -> str:
    """The flags that give Megatron a model's shape, a flag and its value on each line.

    Args:
        model: A Hugging Face directory, or a name of :data:`PUBLISHED`.

    Raises:
        HfConfigError: It is neither.
        UnsupportedModelError: The model is not supported.
    """
    if Path(model).exists():
        shape = ModelShape.from_hf_config(model)
    elif model in PUBLISHED:
        shape = PUBLISHED[model].shape
    else:
        near = nearest_published(model)
        raise HfConfigError(
            f"there is no directory {model}, and no published model of that name; "
            f"{f'did you mean {near}? ' if near else ''}slime-convert list-models prints them"
        )
    lines: list[str] = []
    for word in shape.to_megatron_flags():
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}" if word.replace("-", "").replace(".", "").isalnum() else f' "{word}"'
    return "\n".join(lines)
