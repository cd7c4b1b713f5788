"""A ``config.json`` whose values are checked as they are read (``null`` counts as left out), and its rotary settings.

What transformers computes from a rotary setting was read in its ``modeling_rope_utils``, version 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.files import read_json

_ADVICE = "use the model's original config"
_MODEL_ADVICE = "give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
_LARGEST = 2**48
_MOST_LAYERS = 100_000


class HfConfig:
    """A model's config, which messages call ``where``; ``defaults`` count for keys that it leaves out.

    A value that is missing or of a wrong type is an :class:`HfConfigError`.
    """

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.values, self.where, self.defaults = values, where, dict(defaults or {})

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any]) -> HfConfig:
        """The config of a model directory, of a ``config.json``, or given as a mapping."""
        if isinstance(source, Mapping):
            return cls(source, "the given config")
        path = Path(source)
        path = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
        return cls(read_json(path.parent, path.name, HfConfigError, _MODEL_ADVICE), str(path))

    def updated(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> HfConfig:
        """The same config with other values, and with other defaults."""
        return HfConfig({**self.values, **values}, self.where, {**self.defaults, **(defaults or {})})

    def get(self, key: str) -> Any:
        """A value as it is; the default of one that is left out."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """An entry that must be an integer."""
        value = self._typed(key, default, "an integer", lambda value: type(value) is int)
        if abs(value) > _LARGEST:
            raise self.wrong(key, f"is larger than {_LARGEST}")
        return int(value)

    def nullable(self, key: str) -> int | None:
        """An integer, or ``None`` where the config says ``null``; left out, the default counts."""
        return None if self.values.get(key, self.defaults.get(key)) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """An entry that must be a number."""
        value = self._typed(key, default, "a number", lambda value: type(value) in (int, float))
        try:
            return float(value)
        except OverflowError as error:
            raise self.wrong(key, "is larger than any number") from error

    def switch(self, key: str, default: bool = False) -> bool:
        """An entry that must be true or false."""
        return bool(self._typed(key, default, "true or false", lambda value: isinstance(value, bool)))

    def list_of(self, type_: type, key: str) -> list[Any] | None:
        """An entry that must be a list of values of one type; ``None`` if it is left out."""
        wanted = f"a list of {'texts' if type_ is str else 'integers'}"
        found = self._typed(key, [], wanted, lambda it: isinstance(it, list | tuple) and {*map(type, it)} <= {type_})
        return None if self.get(key) is None else list(found)

    def first(self, *keys: str) -> str:
        """The first of some names that the config has; transformers 5 renames some keys when it saves a config."""
        return next((key for known in (self.values, self.defaults) for key in keys if key in known), keys[0])

    def need(self, key: str, *allowed: Any) -> None:
        """Refuse other values than some (:class:`UnsupportedModelError`); ``None`` allows the key to be left out."""
        value = self.get(key)
        if not any(value == known and type(value) is type(known) for known in allowed):
            shown = ", ".join(json.dumps(known) for known in allowed if known is not None) or "none"
            raise self.refuse(f"{key} {_shown(value)}", shown)

    def refuse(self, what: str, allowed: str) -> UnsupportedModelError:
        """The error about a setting that is not supported."""
        return UnsupportedModelError(
            f"{what} of {self.where} is not supported; allowed: {allowed}; convert another model"
        )

    def wrong(self, what: str, says: str) -> HfConfigError:
        """The error about a setting that no model has."""
        return HfConfigError(f"{what} of {self.where} {says}; {_ADVICE}")

    @property
    def layers(self) -> int:
        """The number of layers."""
        layers = self.integer("num_hidden_layers")
        if not 0 < layers <= _MOST_LAYERS:
            raise self.wrong("num_hidden_layers", f"is {layers}; it must be 1 to {_MOST_LAYERS}")
        return layers

    def layers_of(self, key: str, kinds: Mapping[str, int]) -> tuple[int, ...] | None:
        """A list with the kind of each layer, as its number in ``kinds``; ``None`` if it is left out.

        Another kind is an :class:`UnsupportedModelError`.
        """
        found = self.list_of(str, key)
        if found is None:
            return None
        if others := sorted(set(found) - kinds.keys()):
            raise self.refuse(f"{key} {', '.join(others)}", ", ".join(kinds))
        if len(found) != self.layers:
            raise self.wrong(key, f"has {len(found)} entries, and num_hidden_layers is {self.layers}")
        return tuple(kinds[kind] for kind in found)

    def every(self, key: str, default: int, *, but: bool = False) -> list[int]:
        """A 0 or 1 for each layer from an entry N: 1 for each N-th layer, or for all but those."""
        step = self.integer(key, default)
        if step < 1:
            raise self.refuse(f"{key} {step}", "1 or more")
        return [int(((layer + 1) % step == 0) != but) for layer in range(self.layers)]

    def _typed(self, key: str, default: Any, wanted: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if not fits(value):
            raise HfConfigError(f"{key} is {_shown(value)} in {self.where}; it must be {wanted}; {_ADVICE}")
        return value


def _shown(value: Any) -> str:
    """A value for a message, which may be of any length."""
    try:
        text = json.dumps(value)
    except ValueError:  # a number with too many digits
        return "a very large number"
    return text if len(text) <= 200 else f"{text[:200]}…"


def expert_fields(config: HfConfig, *, normalised: bool) -> dict[str, Any]:
    """The fields about experts and a router that takes a softmax.

    ``normalised`` says whether the chosen experts' weights sum to one where ``norm_topk_prob`` is left out. If so, a
    single expert per token is refused (:class:`UnsupportedModelError`).
    """
    sums_to_one, topk = config.switch("norm_topk_prob", normalised), config.integer("num_experts_per_tok")
    if sums_to_one and topk == 1:
        allowed = "2 or more experts per token (Megatron does not give a single expert the weight 1)"
        raise config.refuse("num_experts_per_tok 1 with norm_topk_prob true", allowed)
    return {
        "num_experts": config.integer(config.first("num_experts", "n_routed_experts", "num_local_experts")),
        "moe_ffn_hidden_size": config.integer("moe_intermediate_size"),
        "moe_router_topk": topk,
        # Megatron's softmax over the chosen logits is the softmax over all, normalised to the chosen ones.
        "moe_router_pre_softmax": not sums_to_one,
    }


def layer_freq(has_experts: list[int]) -> tuple[int, ...] | int:
    """Megatron's way to say which layers have experts: 1 for all, or a 0 or 1 for each."""
    return 1 if all(has_experts) else tuple(has_experts)


def window_fields(config: HfConfig, slides: tuple[int, ...]) -> dict[str, Any]:
    """The fields about a window in the layers that slide, a 0 or 1 for each layer."""
    if not any(slides):
        return {}
    window = config.integer("sliding_window") - 1  # Megatron counts earlier positions only
    return {"window_size": window, "window_attn_skip_freq": None if all(slides) else slides}


def rope_fields(
    config: HfConfig, kinds: Sequence[str] = ("default", "llama3"), *, partial: bool = False
) -> dict[str, Any]:
    """The rotary fields of a shape, from either place in which transformers has kept them.

    Args:
        config: The whole config.
        kinds: Ways of scaling that the family's Megatron model knows.
        partial: Only a part of a head's channels may be rotated.

    Raises:
        HfConfigError: A setting is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: The frequencies are scaled in another way.
    """
    settings = rope_settings(config)
    kind = settings.get("rope_type") or "default"
    percent = settings.number("partial_rotary_factor", 1.0)
    if kind not in kinds or (not partial and percent != 1.0):
        allowed = f"{' or '.join(map(repr, kinds))} with {'any' if partial else '1.0'}"
        raise config.refuse(f"rope_type {kind!r} with partial_rotary_factor {percent}", allowed)
    fields = {"rotary_base": settings.number("rope_theta", 10000.0), "rotary_percent": percent}
    if kind == "default":
        return fields
    return fields | {"llama3": _llama3, "yarn": _yarn, "linear": _linear}[kind](settings)


def rope_settings(config: HfConfig) -> HfConfig:
    """``rope_parameters`` (transformers 5) or ``rope_scaling``, with what older configs have next to them.

    The kind of scaling, ``type`` in older configs, is under ``rope_type``. Settings that contradict one another are an
    :class:`HfConfigError`, and settings that differ between kinds of layers an :class:`UnsupportedModelError`.
    """
    found = [_flat(given, config) for key in ("rope_parameters", "rope_scaling") if (given := config.get(key))]
    settings = dict(found[0]) if found else {}
    if found[1:]:
        new, old = found
        if new | old != old | new or new.keys() - {"rope_theta"} != old.keys() - {"rope_theta"}:
            raise config.wrong(f"rope_parameters {new} and rope_scaling {old}", "differ")
        settings = new | old
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        outside, inside = config.values.get(key), settings.get(key)
        if None not in (outside, inside) and outside != inside:
            what = f"{key} is {outside!r} in {config.where}, but {inside!r} in its rotary settings"
            raise HfConfigError(f"{what}; {_ADVICE}")
        if inside is None and outside is not None and key != "original_max_position_embeddings":
            settings[key] = outside
    return HfConfig(settings, config.where, config.defaults)


def _flat(given: Any, config: HfConfig) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise HfConfigError(f"the rotary settings are {given!r} in {config.where}; they must be an object; {_ADVICE}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise config.refuse(f"a rotary setting that differs between {', '.join(map(str, given))}", "one for all layers")
    settings = {key: value for key, value in given.items() if value is not None}
    kind = settings.pop("type", None)
    if kind is not None and settings.setdefault("rope_type", kind) != kind:
        raise config.wrong(f"type {kind!r} and rope_type {settings['rope_type']!r}", "differ")
    return {"rope_type": "default"} | settings


def _named(settings: HfConfig, kind: str, known: str) -> HfConfig:
    """The settings of one way of scaling; others than those that Megatron has are refused."""
    others = sorted(settings.values.keys() - {"rope_type", "rope_theta", "partial_rotary_factor", *known.split()})
    if others:
        what = ", ".join(f"{key} {settings.values[key]!r}" for key in others)
        raise settings.refuse(f"{what} in the {kind} rope scaling", ", ".join(known.split()))
    return HfConfig(settings.values, f"the {kind} rope scaling of {settings.where}")


def _llama3(settings: HfConfig) -> dict[str, Any]:
    own = _named(settings, "llama3", "factor low_freq_factor high_freq_factor original_max_position_embeddings")
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": own.number("factor"),
        "rope_low_freq_factor": own.number("low_freq_factor"),
        "rope_high_freq_factor": own.number("high_freq_factor"),
        "rope_original_max_position_embeddings": own.integer("original_max_position_embeddings"),
    }


def _linear(settings: HfConfig) -> dict[str, Any]:
    own = _named(settings, "linear", "factor")
    return {"rotary_seq_len_interpolation_factor": own.number("factor")}


def _yarn(settings: HfConfig) -> dict[str, Any]:
    known = "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim truncate"
    own = _named(settings, "yarn", known)
    mscale, all_dim = own.get("mscale"), own.get("mscale_all_dim")
    # Without one of the two, transformers leaves the other out of the factor on the rotated channels.
    if not (mscale and all_dim) and (all_dim or mscale not in (None, 1)):
        raise own.refuse(f"mscale {mscale} with mscale_all_dim {all_dim}", "both and not 0, mscale 1 alone, or none")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": own.number("factor"),
        "original_max_position_embeddings": own.integer("original_max_position_embeddings"),
        "beta_fast": own.number("beta_fast", 32.0),
        "beta_slow": own.number("beta_slow", 1.0),
        "mscale": own.number("mscale", 1.0),
        "mscale_all_dim": own.number("mscale_all_dim", 0.0),
        "yarn_rounds_range": own.switch("truncate", True),
    }
