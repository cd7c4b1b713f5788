"""The kinds of quantization that are read, and ``quantization_config``, which says how a model is quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError, QuantizationError, WeightError
from slime_convert.files import read_json
from slime_convert.files.partial import refuse_unfinished

_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name
_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "actorder": None}
INSTEAD = "convert the model's unquantized release"


@dataclass(frozen=True)
class Fp8Format:
    """E4M3 with a scale per block of so many rows and columns: DeepSeek-V3's ``quant_method: fp8``."""

    block: tuple[int, int]

    def __str__(self) -> str:
        return f"fp8, fmt e4m3, weight_block_size {list(self.block)}"

    def to_config(self, unquantized: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint that keeps the modules ``unquantized`` as they are."""
        method = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
        return {**method, "modules_to_not_convert": list(unquantized), "weight_block_size": list(self.block)}


@dataclass(frozen=True)
class Int4Format:
    """Whole numbers from -8 to 7, ``group_size`` columns with one scale: compressed-tensors' ``pack-quantized``."""

    group_size: int

    def __str__(self) -> str:
        return f"compressed-tensors, format pack-quantized, num_bits 4, group_size {self.group_size}"

    def to_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint whose linear modules are packed, except those of ``ignore``."""
        weights: dict[str, Any] = {**_INT4_WEIGHTS, "group_size": self.group_size, "block_structure": None}
        weights |= {"dynamic": False, "observer": "minmax", "observer_kwargs": {}}
        group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
        method = {"format": "pack-quantized", "quant_method": "compressed-tensors", "quantization_status": "compressed"}
        return {**method, "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None}


@dataclass(frozen=True)
class Mxfp4Format:
    """E2M1 in blocks of 32 with a shared power of two: gpt-oss's ``quant_method: mxfp4``. It is read, not written."""

    def __str__(self) -> str:
        return "mxfp4, blocks of 32"


QuantizedFormat = Fp8Format | Int4Format | Mxfp4Format
"""The kinds of quantization that are read."""


def settings_of(config: Mapping[str, Any]) -> Any:
    """A config's entry about quantization, unchecked; ``None`` without one."""
    return next((config[key] for key in _KEYS if config.get(key) is not None), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, unquantized."""
    return {key: value for key, value in config.items() if key not in _KEYS}


def read_format(directory: Path) -> QuantizedFormat | None:
    """How the weights of a model directory are quantized; ``None`` if they are not.

    A :class:`QuantizationError` if it is in a way that is not supported, a :class:`HfConfigError` without a config.
    """
    refuse_unfinished(directory)
    config = read_json(directory, "config.json", HfConfigError, "give a Hugging Face model directory")
    return format_of(config, str(directory / "config.json"))


def format_of(config: Mapping[str, Any], where: str) -> QuantizedFormat | None:
    """How a model with this ``config.json`` is quantized; ``where`` names the config in messages."""
    settings = settings_of(config)
    if settings is None:
        return None
    where = f"quantization_config of {where}"
    if not isinstance(settings, Mapping):
        raise QuantizationError(f"{where} is a JSON {type(settings).__name__}, not an object; fetch the model again")
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(settings, where)
    if method == "compressed-tensors":
        return _int4(settings, where)
    if method == "mxfp4":
        return Mxfp4Format()
    raise QuantizationError(
        f"quant_method {method!r} in {where} is not supported; allowed: 'fp8' with weight_block_size, "
        f"'compressed-tensors' with format pack-quantized, 'mxfp4'; {INSTEAD}"
    )


def need_whole_groups(name: str, columns: int, group_size: int) -> None:
    """Refuse a weight that groups of INT4 do not divide (:class:`WeightError`)."""
    if columns % group_size:
        raise WeightError(
            f"{name} has {columns} columns, which groups of {group_size} do not divide; "
            "choose another group size, or leave the weight as it is with ignore="
        )


def _fp8(settings: Mapping[str, Any], where: str) -> Fp8Format:
    _need(settings.get("fmt", "e4m3"), "e4m3", "fmt", where)
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise QuantizationError(
            f"weight_block_size {block!r} in {where} is not supported; allowed: two whole numbers of 1 or more, "
            f"such as [128, 128]; {INSTEAD}"
        )
    return Fp8Format((block[0], block[1]))


def _int4(settings: Mapping[str, Any], where: str) -> Int4Format:
    _need(settings.get("format"), "pack-quantized", "format", where)
    # Weights that were rotated, or lost their zeros, before they were packed would be read as other weights.
    _need(settings.get("transform_config") or None, None, "transform_config", where)
    sparsity = settings.get("sparsity_config") or None
    if not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        _need(sparsity, None, "sparsity_config", where)
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise QuantizationError(f"config_groups in {where} is not supported; allowed: exactly one group; {INSTEAD}")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise QuantizationError(f"the only group in {where} says nothing of weights; fetch the model again")
    if group.get("format") is not None:
        _need(group["format"], "pack-quantized", "format", where)
    for key, value in _INT4_WEIGHTS.items():
        _need(weights.get(key), value, key, where)
    size = weights.get("group_size")
    if type(size) is not int or size < 1:
        raise QuantizationError(f"group_size {size!r} in {where} must be a whole number of 1 or more; {INSTEAD}")
    return Int4Format(size)


def _need(given: Any, allowed: Any, key: str, where: str) -> None:
    if given != allowed or type(given) is not type(allowed):
        raise QuantizationError(f"{key} {given!r} in {where} is not supported; allowed: {allowed!r}; {INSTEAD}")
