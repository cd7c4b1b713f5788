"""What ``quantization_config`` in ``config.json`` says, read and written. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.errors import HfConfigError, QuantizationError
from slime_convert.unfinished import refuse_unfinished

_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name


@dataclass(frozen=True)
class Fp8Format:
    """E4M3 with a scale per block: DeepSeek-V3's ``quant_method: fp8``.

    Attributes:
        block: Rows and columns of one block.
    """

    block: tuple[int, int]

    def __str__(self) -> str:
        """One line about it."""
        return f"fp8, fmt e4m3, weight_block_size {list(self.block)}"

    def to_config(self, unquantized: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint that keeps the modules ``unquantized`` as they are."""
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": list(unquantized),
            "quant_method": "fp8",
            "weight_block_size": list(self.block),
        }


@dataclass(frozen=True)
class Int4Format:
    """Whole numbers from -8 to 7 with a scale per group: compressed-tensors' ``pack-quantized``.

    Attributes:
        group_size: Columns that share a scale.
    """

    group_size: int

    def __str__(self) -> str:
        """One line about it."""
        return f"compressed-tensors, format pack-quantized, num_bits 4, group_size {self.group_size}"

    def to_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint whose linear modules are packed but for those of ``ignore``."""
        weights: dict[str, Any] = {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": self.group_size,
            "num_bits": 4,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "group",
            "symmetric": True,
            "type": "int",
        }
        group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
        return {
            "config_groups": {"group_0": group},
            "format": "pack-quantized",
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }


def read_config(directory: Path) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        HfConfigError: There is none, or it holds no JSON object.
    """
    path = directory / "config.json"
    advice = "give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HfConfigError(f"cannot read {path} ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise HfConfigError(f"{path} is no valid JSON ({error}); {advice}") from error
    if not isinstance(config, dict):
        raise HfConfigError(f"{path} holds a JSON {type(config).__name__}, not an object; {advice}")
    return config


def settings_of(config: Mapping[str, Any]) -> Any:
    """What a config says of quantization, as it stands there; ``None`` if nothing."""
    return next((config[key] for key in _KEYS if config.get(key) is not None), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model, unquantized."""
    return {key: value for key, value in config.items() if key not in _KEYS}


def read_format(directory: Path) -> Fp8Format | Int4Format | None:
    """How the weights of a model directory are quantized; ``None`` if its config says nothing of it.

    Raises:
        HfConfigError: There is no readable ``config.json``.
        QuantizationError: They are quantized in another way than the two that are read.
    """
    refuse_unfinished(directory)
    return format_of(read_config(directory), str(directory / "config.json"))


def format_of(config: Mapping[str, Any], where: str) -> Fp8Format | Int4Format | None:
    """How the weights of a model are quantized; ``None`` if its config says nothing of it.

    Args:
        config: The model's ``config.json``.
        where: How to name it in a message.

    Raises:
        QuantizationError: They are quantized in another way than the two that are read.
    """
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
    raise QuantizationError(
        f"quant_method {method!r} in {where} is not supported; allowed: 'fp8' with weight_block_size, "
        "'compressed-tensors' with format pack-quantized; convert the model's unquantized release"
    )


def _fp8(settings: Mapping[str, Any], where: str) -> Fp8Format:
    _need(settings.get("fmt", "e4m3"), "e4m3", "fmt", where)
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise QuantizationError(
            f"weight_block_size {block!r} in {where} is not supported; allowed: two whole numbers of 1 or more, "
            "such as [128, 128]; convert a model with block-wise scales"
        )
    return Fp8Format((block[0], block[1]))


def _int4(settings: Mapping[str, Any], where: str) -> Int4Format:
    _need(settings.get("format"), "pack-quantized", "format", where)
    _refuse_what_was_done_before(settings, where)
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise QuantizationError(
            f"config_groups in {where} is not supported; allowed: an object with exactly one group of weights; "
            "convert the model's unquantized release"
        )
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise QuantizationError(f"the only group in {where} says nothing of weights; fetch the model again")
    if group.get("format") is not None:
        _need(group["format"], "pack-quantized", "format", where)
    for key, value in {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}.items():
        _need(weights.get(key), value, key, where)
    _need(weights.get("actorder"), None, "actorder", where)
    size = weights.get("group_size")
    if type(size) is not int or size < 1:
        raise QuantizationError(f"group_size {size!r} in {where} must be a whole number of 1 or more")
    return Int4Format(size)


def _refuse_what_was_done_before(settings: Mapping[str, Any], where: str) -> None:
    """Refuse weights that were rotated or compressed by zeros before they were packed: what is read would be others."""
    _need(settings.get("transform_config") or None, None, "transform_config", where)
    sparsity = settings.get("sparsity_config") or None
    if not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        _need(sparsity, None, "sparsity_config", where)


def _need(given: Any, allowed: Any, key: str, where: str) -> None:
    if given != allowed or type(given) is not type(allowed):
        raise QuantizationError(
            f"{key} {given!r} in {where} is not supported; allowed: {allowed!r}; "
            "convert the model's unquantized release"
        )
