"""A model's config as mbridge 0.15 expects it: an object of transformers, with the names of its version 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from slime_convert.errors import HfConfigError, UnsupportedModelError

# Settings that mbridge passes over, although they change the model.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
}
_SIZES = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "llama": ("default", "linear", "llama3"),
    "deepseek_v3": ("default", "yarn"),
}


def config_for_mbridge(settings: Mapping[str, Any], where: str) -> Any:
    """The config as an object. No code that comes with a model is run.

    Args:
        settings: What ``config.json`` holds. A model type that transformers has no class for gets its plain one.
        where: How to name it in a message.

    Raises:
        HfConfigError: transformers refuses it.
        UnsupportedModelError: It has a setting that would be lost.
    """
    family = settings.get("model_type")
    kind = CONFIG_MAPPING[family] if family in CONFIG_MAPPING else PreTrainedConfig  # noqa: SIM401 - lazy: `get` finds nothing
    try:
        config = kind.from_dict(dict(settings))
    except Exception as error:  # each class has checks of its own
        raise HfConfigError(f"transformers cannot read {where} ({error}); use the model's original config") from error
    config.model_type = family
    for key in _SIZES:
        if not isinstance(value := getattr(config, key, None), int):
            raise HfConfigError(
                f"{key} is {value!r} in {where}; it must be an integer; use the model's original config"
            )
    allowed = dict(_ALLOWED) | ({"sliding_window": (None,)} if family == "mixtral" else {})
    for key, values in allowed.items():
        if settings.get(key) not in values:
            shown = ", ".join(json.dumps(value) for value in values if value is not None) or "none"
            raise UnsupportedModelError(
                f"{key} {json.dumps(settings[key])} of {where} is not carried by mbridge; allowed: {shown}; "
                "convert a model without it"
            )
    _name_as_before(config, settings, where)
    return config


def _name_as_before(config: Any, settings: Mapping[str, Any], where: str) -> None:
    """Give the config the attributes that transformers 5 has moved, renamed or left empty."""
    rope = getattr(config, "rope_parameters", None) or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    allowed = _ROPE_TYPES.get(config.model_type, ("default",))
    if kind not in allowed:
        raise UnsupportedModelError(
            f"rope_type {kind!r} of {where} is not carried by mbridge; allowed: {', '.join(map(repr, allowed))}; "
            "convert a model without it"
        )
    theta = rope.get("rope_theta") or settings.get("rope_theta") or getattr(config, "default_theta", 10000.0)
    # mbridge reads Llama 3's scaling as a linear one.
    config.rope_scaling = None if kind in ("default", "llama3") else {**rope, "type": kind}
    # To transformers 5 that is another name of `rope_parameters`; mbridge asks whether the config has an entry for it.
    vars(config)["rope_scaling"] = config.rope_scaling
    config.llama3_rope = dict(rope) if kind == "llama3" else None
    config.rope_theta = theta
    percent = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    config.partial_rotary_factor = 1.0 if percent is None else percent
    config.num_nextn_predict_layers = settings.get(
        "num_nextn_predict_layers", getattr(config, "num_mtp_layers", 0) or 0
    )
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
