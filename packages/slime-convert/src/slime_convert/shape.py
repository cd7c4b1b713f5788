"""The shape of a model: what ``config.json``, Megatron's shape flags and the weight mapping agree on. No torch here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError, ShapeMismatchError, UnsupportedModelError


@dataclass(frozen=True)
class _Family:
    """What a Hugging Face ``model_type`` implies that its ``config.json`` does not say.

    Attributes:
        qk_layernorm: Queries and keys pass an RMSNorm per head.
        head_dim: Channels of one head when the config has no ``head_dim``; ``None`` for hidden_size / heads.
    """

    qk_layernorm: bool
    head_dim: int | None


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(qk_layernorm=False, head_dim=None),
    "qwen3": _Family(qk_layernorm=True, head_dim=128),
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder's shape, under Megatron's argument names.

    Attributes:
        family: Hugging Face ``model_type``; picks the weight mapping. One of :data:`FAMILIES`.
        num_layers: Transformer layers.
        hidden_size: Channels of the residual stream.
        ffn_hidden_size: Channels between the MLP's two projections.
        num_attention_heads: Query heads.
        num_query_groups: Key-value heads; equal to ``num_attention_heads`` without grouped-query attention.
        kv_channels: Channels of one head.
        vocab_size: Rows of the embedding in the Hugging Face model, before any padding.
        max_position_embeddings: Longest context, in tokens.
        rotary_base: Base of the rotary embedding's wavelengths (RoPE theta).
        norm_epsilon: Term added to the mean square in RMSNorm.
        qk_layernorm: Queries and keys pass an RMSNorm per head.
        add_qkv_bias: The query, key and value projections have biases.
        untie_embeddings_and_output_weights: The output layer has weights of its own.
        use_rope_scaling: Llama 3.x scaling of the low rotary frequencies; the four fields below then count.
        rope_scaling_factor: By how much the low frequencies are divided.
        rope_low_freq_factor: Wavelengths above original context / this factor are divided in full.
        rope_high_freq_factor: Wavelengths below original context / this factor are left alone.
        rope_original_max_position_embeddings: Context length before scaling, in tokens.

    Raises:
        UnsupportedModelError: Unknown family.
        HfConfigError: A size is not positive, or the query heads do not divide over the groups.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-6
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnsupportedModelError(_unknown_family(self.family, "this ModelShape"))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise HfConfigError(f"{field.name} {value} must be positive and finite; correct the model's config")
        if self.num_attention_heads % self.num_query_groups:
            raise HfConfigError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_query_groups "
                f"{self.num_query_groups}; correct the model's config"
            )

    @classmethod
    def from_hf_config(cls, source: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape that a Hugging Face config describes.

        Args:
            source: A model directory, a ``config.json``, or the config as a mapping. Both places of the rotary
                settings are understood: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling``.

        Returns:
            The shape.

        Raises:
            HfConfigError: There is no ``config.json``, it is no JSON object, or a key is missing or of a wrong type.
            UnsupportedModelError: The model type, or one of its settings, is not supported.
        """
        config, where = _read_config(source)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise UnsupportedModelError(_unknown_family(model_type, where))
        family = FAMILIES[model_type]
        _refuse_unsupported(config, where)
        heads = _integer(config, "num_attention_heads", where)
        hidden_size = _integer(config, "hidden_size", where)
        return cls(
            family=model_type,
            num_layers=_integer(config, "num_hidden_layers", where),
            hidden_size=hidden_size,
            ffn_hidden_size=_integer(config, "intermediate_size", where),
            num_attention_heads=heads,
            num_query_groups=_integer(config, "num_key_value_heads", where, default=heads),
            kv_channels=_integer(config, "head_dim", where, default=family.head_dim or hidden_size // max(heads, 1)),
            vocab_size=_integer(config, "vocab_size", where),
            max_position_embeddings=_integer(config, "max_position_embeddings", where),
            norm_epsilon=_number(config, "rms_norm_eps", where, default=1e-6),
            qk_layernorm=family.qk_layernorm,
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
            **_rope_settings(config, where),
        )

    def to_megatron_flags(self) -> list[str]:
        """The flags that give Megatron this shape, as words of a command line (values follow their flags)."""
        words: list[str] = []
        for flag in SHAPE_FLAGS:
            if not flag.emitted(self):
                continue
            value = flag.expected(self)
            words += [flag.name] if flag.is_switch else [flag.name, _text(value)]
        return words

    def to_megatron_args(self) -> dict[str, Any]:
        """The arguments that a Megatron checkpoint of this shape records, by Megatron's names, as plain values."""
        names = (
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size "
            "max_position_embeddings rotary_base norm_epsilon qk_layernorm add_qkv_bias "
            "untie_embeddings_and_output_weights use_rope_scaling rope_scaling_factor"
        )
        fixed = {
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "group_query_attention": self.num_query_groups < self.num_attention_heads,
        }
        return {name: getattr(self, name) for name in names.split()} | fixed

    def padded_vocab_size(self, tensor_parallel: int, divisible_by: int = 128) -> int:
        """Rows of the embedding in Megatron: the vocabulary rounded up to ``divisible_by`` × ``tensor_parallel``."""
        multiple = divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


def _always(_: ModelShape) -> bool:
    return True


def _never(_: ModelShape) -> bool:
    return False


@dataclass(frozen=True)
class ShapeFlag:
    """A shape flag of Megatron's command line.

    Attributes:
        name: As typed, such as ``--num-layers``.
        dest: Its name without dashes; the key in :func:`check_flags`.
        type: ``int``, ``float``, ``str``, or ``bool`` for a switch.
        help: One line, without the default.
        expected: The value that a shape asks for.
        emitted: Whether :meth:`ModelShape.to_megatron_flags` writes the flag.
        compared: Whether a given value must equal ``expected``.
    """

    name: str
    dest: str
    type: type
    help: str
    expected: Callable[[ModelShape], Any]
    emitted: Callable[[ModelShape], bool] = _always
    compared: bool = True

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool


def _field(name: str, type_: type, help_: str, **kwargs: Any) -> ShapeFlag:
    """A flag for the field of :class:`ModelShape` with its name; a switch is emitted when the field is true."""
    if type_ is bool:
        kwargs["emitted"] = lambda shape: getattr(shape, name)
    return ShapeFlag(_flag_name(name), name, type_, help_, lambda shape: getattr(shape, name), **kwargs)


def _fixed(name: str, value: Any, help_: str, **kwargs: Any) -> ShapeFlag:
    """A flag with one value for every supported family."""
    return ShapeFlag(_flag_name(name), name, type(value), help_, lambda _: value, **kwargs)


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_grouped(shape: ModelShape) -> bool:
    return shape.num_query_groups < shape.num_attention_heads


SHAPE_FLAGS: tuple[ShapeFlag, ...] = (
    _fixed("swiglu", True, "gated MLP with SiLU"),
    _field("num_layers", int, "transformer layers"),
    _field("hidden_size", int, "channels of the residual stream"),
    _field("ffn_hidden_size", int, "channels between the MLP's two projections"),
    _field("num_attention_heads", int, "query heads"),
    # Megatron reads num_query_groups only with this switch; with as many groups as heads it changes nothing.
    _fixed("group_query_attention", True, "several query heads share a key-value head", emitted=_is_grouped),
    _field("num_query_groups", int, "key-value heads", emitted=_is_grouped),
    _field("kv_channels", int, "channels of one attention head"),
    _field("vocab_size", int, "rows of the embedding before padding"),
    # A shorter context than the config's is no contradiction: nothing in the weights depends on it.
    _field("max_position_embeddings", int, "longest context in tokens", compared=False),
    _fixed("use_rotary_position_embeddings", True, "rotary position embedding"),
    _fixed("position_embedding_type", "rope", "kind of position embedding", emitted=_never),
    _field("rotary_base", float, "base of the rotary wavelengths"),
    _fixed("rotary_percent", 1.0, "part of a head's channels that is rotated", emitted=_never),
    _field("use_rope_scaling", bool, "Llama 3.x scaling of the low rotary frequencies"),
    _field(
        "rope_scaling_factor",
        float,
        "divisor of the low rotary frequencies",
        emitted=lambda shape: shape.use_rope_scaling,
    ),
    _fixed("normalization", "RMSNorm", "kind of normalization"),
    _field("norm_epsilon", float, "term added to the mean square in the norm"),
    _fixed("disable_bias_linear", True, "no biases in linear layers"),
    _field("add_qkv_bias", bool, "biases in the query, key and value projections"),
    _field("qk_layernorm", bool, "RMSNorm on each query and key head"),
    _field("untie_embeddings_and_output_weights", bool, "an output layer with weights of its own"),
)
"""Every shape flag that is accepted, in the order in which they are written."""


def check_flags(shape: ModelShape, given: Mapping[str, Any]) -> None:
    """Refuse flags that contradict a model's config.

    Args:
        shape: From the Hugging Face config.
        given: Values by ``dest`` of :data:`SHAPE_FLAGS`. ``None``, a switch that is ``False``, and other keys count
            as not given; a flag that is not given takes the config's value.

    Raises:
        ShapeMismatchError: One message with every contradiction.
    """
    wrong = [text for flag in SHAPE_FLAGS if (text := _contradiction(flag, shape, given.get(flag.dest)))]
    if wrong:
        raise ShapeMismatchError(
            f"{len(wrong)} shape flag{'s' * (len(wrong) > 1)} contradict{'s' * (len(wrong) == 1)} the model's config: "
            + "; ".join(wrong)
            + ". Leave the flags out (the config's values are used), or give the config that they describe"
        )


def _contradiction(flag: ShapeFlag, shape: ModelShape, value: Any) -> str | None:
    expected = flag.expected(shape)
    if value is None or value is False or not flag.compared:
        return None
    if flag.dest == "rope_scaling_factor" and not shape.use_rope_scaling:
        return f"{flag.name} {_text(value)} is given, but the config has no rope scaling"
    if flag.is_switch:
        return None if expected else f"{flag.name} is given, but the config says no"
    if value == expected or (flag.type is float and math.isclose(value, expected, rel_tol=1e-6)):
        return None
    return f"{flag.name} {_text(value)} is given, but the config says {_text(expected)}"


def _text(value: Any) -> str:
    """A value as it stands on a command line. Whole floats lose their fraction: Megatron reads some as integers."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _read_config(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The config as a mapping, and how to name it in a message."""
    if isinstance(source, Mapping):
        return source, "the given config"
    path = Path(source)
    path = path if path.suffix == ".json" else path / "config.json"
    advice = "give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HfConfigError(f"cannot read {path} ({error.strerror}); {advice}") from error
    except ValueError as error:
        raise HfConfigError(f"{path} is no valid JSON ({error}); {advice}") from error
    if not isinstance(config, dict):
        raise HfConfigError(f"{path} holds a JSON {type(config).__name__}, not an object; {advice}")
    return config, str(path)


def _unknown_family(model_type: Any, where: str) -> str:
    return (
        f"model_type {model_type!r} of {where} is not supported; allowed: {', '.join(FAMILIES)}; "
        "convert a model of one of these families"
    )


def _integer(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """An entry that must be an integer; ``null`` counts as left out."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise HfConfigError(f"{key} is {value!r} in {where}; it must be an integer; use the model's original config")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """An entry that must be a number; ``null`` counts as left out."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HfConfigError(f"{key} is {value!r} in {where}; it must be a number; use the model's original config")
    return float(value)


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    """Settings of the supported families that change the model in ways that the mapping does not carry."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "quantization_config": (None,),
    }
    for key, values in allowed.items():
        if config.get(key) not in values:
            shown = ", ".join(json.dumps(value) for value in values if value is not None) or "none"
            raise UnsupportedModelError(
                f"{key} {json.dumps(config[key])} of {where} is not supported; allowed: {shown}; "
                "convert a model without it"
            )


def _rope_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The rotary fields of :class:`ModelShape`, from either place in which transformers has kept them."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise HfConfigError(
            f"the rotary settings are {settings!r} in {where}; they must be an object; use the model's original config"
        )
    kind = settings.get("rope_type") or settings.get("type") or "default"
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind not in ("default", "llama3") or partial != 1.0:
        raise UnsupportedModelError(
            f"rope_type {kind!r} with partial_rotary_factor {partial} of {where} is not supported; "
            "allowed: 'default' or 'llama3' with 1.0; convert a model without it"
        )
    holder = config if settings.get("rope_theta") is None else settings
    fields = {"rotary_base": _number(holder, "rope_theta", where, default=10000.0)}
    if kind == "default":
        return fields
    where = f"the llama3 rope scaling of {where}"
    return fields | {
        "use_rope_scaling": True,
        "rope_scaling_factor": _number(settings, "factor", where),
        "rope_low_freq_factor": _number(settings, "low_freq_factor", where),
        "rope_high_freq_factor": _number(settings, "high_freq_factor", where),
        "rope_original_max_position_embeddings": _integer(settings, "original_max_position_embeddings", where),
    }
