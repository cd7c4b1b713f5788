"""The rotary settings of a Hugging Face config, old and new, as fields of a shape.

What transformers computes from a setting was read in its ``modeling_rope_utils``, version 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.shape.config_values import integer, number
from slime_convert.shape.families import Family

_Settings = Mapping[str, Any]
_ADVICE = "use the model's original config"


def rope_settings(config: _Settings, family: Family, where: str) -> dict[str, Any]:
    """The rotary fields of a shape, from either place in which transformers has kept them.

    Args:
        config: The whole config.
        family: Of the model.
        where: The config's name, for messages.

    Raises:
        HfConfigError: A setting is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: The frequencies are scaled in a way that the family's Megatron model does not know.
    """
    settings = _given(config, where)
    kind = settings.get("rope_type", "default")
    percent = _number(config, settings, "partial_rotary_factor", where, default=family.rotary_percent or 1.0)
    kinds: tuple[str, ...] = ("default", "yarn") if family.latent_attention else ("default", "llama3")
    kinds = kinds if family.rotary_percent is None else ("default",)
    if kind not in kinds or (family.rotary_percent is None and percent != 1.0):
        factors = "1.0" if family.rotary_percent is None else "any"
        raise UnsupportedModelError(
            f"rope_type {kind!r} with partial_rotary_factor {percent} of {where} is not supported; "
            f"allowed: {' or '.join(map(repr, kinds))} with {factors}; convert a model without it"
        )
    fields = {
        "rotary_base": _number(config, settings, "rope_theta", where, default=10000.0),
        "rotary_percent": percent,
        "rotary_interleaved": family.rotary_interleaved,
    }
    if kind == "default":
        return fields
    _refuse_two_values(config, settings, "original_max_position_embeddings", where)
    return fields | (_yarn_scaling if kind == "yarn" else _llama3_scaling)(settings, where)


def _given(config: _Settings, where: str) -> dict[str, Any]:
    """``rope_parameters`` (transformers 5) or ``rope_scaling``, without what is ``null``.

    The kind of scaling, of old ``type``, is under ``rope_type``.
    """
    found = [_flat(given, where) for key in ("rope_parameters", "rope_scaling") if (given := config.get(key))]
    if not found[1:]:
        return found[0] if found else {}
    new, old = found
    if new | old != old | new or new.keys() - {"rope_theta"} != old.keys() - {"rope_theta"}:
        raise HfConfigError(f"rope_parameters {new} and rope_scaling {old} of {where} differ; {_ADVICE}")
    return new | old


def _flat(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise HfConfigError(f"the rotary settings are {given!r} in {where}; they must be an object; {_ADVICE}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"the rotary settings of {where} differ between {', '.join(map(str, given))}, which is not supported; "
            "allowed: one for all layers; convert a model without it"
        )
    settings = {key: value for key, value in given.items() if value is not None}
    kind = settings.pop("type", None)
    if kind is not None and settings.setdefault("rope_type", kind) != kind:
        raise HfConfigError(f"type {kind!r} and rope_type {settings['rope_type']!r} of {where} differ; {_ADVICE}")
    return {"rope_type": "default"} | settings


def _refuse_two_values(config: _Settings, settings: _Settings, key: str, where: str) -> None:
    beside, inside = config.get(key), settings.get(key)
    if None not in (beside, inside) and beside != inside:
        raise HfConfigError(f"{key} is {beside!r} in {where}, but {inside!r} in its rotary settings; {_ADVICE}")


def _number(config: _Settings, settings: _Settings, key: str, where: str, default: float) -> float:
    """A number that stands in the rotary settings or, of old, beside them."""
    _refuse_two_values(config, settings, key, where)
    return number(settings if key in settings else config, key, where, default)


def _refuse_others(settings: _Settings, known: str, where: str) -> None:
    """Refuse settings of the frequencies that Megatron does not have."""
    others = sorted(set(settings) - {"rope_type", "rope_theta", "partial_rotary_factor", *known.split()})
    if others:
        raise UnsupportedModelError(
            f"{', '.join(f'{key} {settings[key]!r}' for key in others)} in {where} is not supported; "
            f"allowed: {', '.join(known.split())}; convert a model without it"
        )


def _llama3_scaling(settings: _Settings, where: str) -> dict[str, Any]:
    where = f"the llama3 rope scaling of {where}"
    _refuse_others(settings, "factor low_freq_factor high_freq_factor original_max_position_embeddings", where)
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": number(settings, "factor", where),
        "rope_low_freq_factor": number(settings, "low_freq_factor", where),
        "rope_high_freq_factor": number(settings, "high_freq_factor", where),
        "rope_original_max_position_embeddings": integer(settings, "original_max_position_embeddings", where),
    }


def _yarn_scaling(settings: _Settings, where: str) -> dict[str, Any]:
    where = f"the yarn rope scaling of {where}"
    # Megatron rounds the range of channels always, as transformers does unless told not to truncate.
    settings = {key: value for key, value in settings.items() if (key, value) != ("truncate", True)}
    known = "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
    _refuse_others(settings, known, where)
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    # Without one of the two, transformers leaves the other out of the factor on the rotated channels.
    if not (mscale and all_dim) and (all_dim or mscale not in (None, 1)):
        raise UnsupportedModelError(
            f"mscale {mscale} with mscale_all_dim {all_dim} in {where} is not supported; "
            "allowed: both and not 0, mscale 1 alone, or none; convert a model without it"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": number(settings, "factor", where),
        "original_max_position_embeddings": integer(settings, "original_max_position_embeddings", where),
        "beta_fast": number(settings, "beta_fast", where, default=32.0),
        "beta_slow": number(settings, "beta_slow", where, default=1.0),
        "mscale": number(settings, "mscale", where, default=1.0),
        "mscale_all_dim": number(settings, "mscale_all_dim", where, default=0.0),
    }
