"""The supported families by ``model_type``, and the fields of a shape that a model's config gives."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from slime_convert.errors import UnsupportedModelError
from slime_convert.families.config import HfConfig, rope_fields
from slime_convert.families.family import Family

_FIRST = ("llama", "qwen", "glm", "deepseek", "gpt_oss", "gemma3")  # messages name their families in this order


def _listed() -> Iterator[Family]:
    """The families that files of this folder list in ``FAMILIES``; a further file needs no row here."""
    files = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    for name in dict.fromkeys((*_FIRST, *sorted(files))):
        yield from getattr(import_module(f"{__package__}.{name}"), "FAMILIES", ())


FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _listed()}
"""Every supported family."""

_ELSEWHERE = {
    "gemma3": "gemma3 with a vision tower; store its text part as gemma3_text",
    "glm5_next": "GLM-5.3-Flash, another architecture than GLM-5",
    **dict.fromkeys(("ministral", "ministral3", "mistral3", "pixtral"), "another architecture than Mistral 7B's"),
}


def unknown_family(model_type: Any, where: str) -> str:
    """The message about another ``model_type``."""
    known = _ELSEWHERE.get(model_type) if isinstance(model_type, str) else None
    return (
        f"model_type {str(model_type)[:80]!r} of {where} is not supported{f' ({known})' if known else ''}; "
        f"allowed: {', '.join(FAMILIES)}; convert a model of one of these families"
    )


def shape_values(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`slime_convert.ModelShape`; see there, ``from_hf_config``."""
    config = HfConfig.read(source)
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(unknown_family(model_type, config.where))
    config = config.updated({}, family.defaults)
    for key, allowed in {**_ALLOWED, **family.allowed}.items():
        if key not in family.ignored:
            config.need(key, *allowed)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    groups = config.nullable("num_key_value_heads")
    common: dict[str, Any] = {
        "family": family.model_type,
        "num_layers": config.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": config.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": heads if groups is None else groups,
        "kv_channels": config.integer("head_dim", max(hidden // max(heads, 1), 1)),
        "vocab_size": config.integer("vocab_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "untie_embeddings_and_output_weights": not config.switch("tie_word_embeddings"),
    }
    given = dict(family.fields(config))
    if "rotary_base" not in given:
        given |= rope_fields(config)
    if "layer_types" not in family.ignored:
        config.layers_of("layer_types", {"full_attention": 0})
    return common | given


# Settings of every family that change the model in ways that no table carries unless it says so.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
