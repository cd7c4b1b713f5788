"""What Hugging Face directories and ``torch_dist`` checkpoints hold, told from their headers. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_convert.checkpoint import Contents, TensorInfo
from slime_convert.errors import ConvertError, HfConfigError
from slime_convert.safetensors_files import read_directory
from slime_convert.shape import ModelShape
from slime_convert.torch_dist.headers import read_headers
from slime_convert.torch_dist.layout import METADATA, RELEASE, find_iteration, fused_name, is_optimizer


def hf_contents(directory: Path) -> Contents:
    """The contents of a Hugging Face directory.

    Raises:
        HfConfigError: A shard is missing, cut off or damaged, or ``config.json`` is no JSON object.
    """
    entries = read_directory(directory)
    config = read_config(directory)
    family = config.get("model_type")
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    shape = shape_of(config)
    return Contents(
        format="hf",
        directory=directory,
        files={path.name: path.stat().st_size for path in sorted({entry.path for entry in entries.values()})},
        tensors=tuple(TensorInfo(name, e.dtype, e.shape, e.nbytes) for name, e in entries.items()),
        family=family if isinstance(family, str) else None,
        shape=shape,
        quantization=describe_quantization(quantization) if quantization else None,
        packed_bits=_packed_bits(quantization),
        repeated=_repeated_in_hf(config, shape),
    )


def torch_dist_contents(path: Path) -> Contents:
    """The contents of one iteration of a ``torch_dist`` checkpoint.

    Raises:
        CheckpointError: It is no readable ``torch_dist`` checkpoint.
    """
    iteration = find_iteration(path)
    headers = read_headers(iteration)
    tensors = {key: info for key, info in headers.tensors.items() if not is_optimizer(key)}
    others = [other.parent.name for other in sorted(iteration.parent.glob(f"*/{METADATA}"))]
    named = iteration.name == RELEASE or iteration.name.startswith("iter_")
    step = None if headers.iteration is None else str(headers.iteration)
    family = headers.arguments.get("hf_model_type")
    return Contents(
        format="torch_dist",
        directory=iteration,
        files=headers.files,
        tensors=tuple(tensors.values()),
        optimizer=tuple(info for key, info in headers.tensors.items() if is_optimizer(key)),
        iteration=iteration.name if named else step,
        iterations=tuple(name for name in others if name == RELEASE or name.startswith("iter_")),
        family=family if isinstance(family, str) else None,
        arguments=headers.arguments,
        repeated=_repeated_in_torch_dist(tensors, headers.arguments),
    )


def _repeated_in_hf(config: Mapping[str, Any], shape: ModelShape | None) -> frozenset[str]:
    """A tied output layer, and the copies of embedding and output layer in modules that predict further tokens."""
    names = {"lm_head.weight"} if config.get("tie_word_embeddings") is True else set()
    if shape is not None:
        for layer in range(shape.num_layers, shape.num_layers + shape.mtp_num_layers):
            names |= {f"model.layers.{layer}.{copy}.weight" for copy in ("embed_tokens", "shared_head.head")}
    return frozenset(names)


def _repeated_in_torch_dist(tensors: Mapping[str, TensorInfo], arguments: Mapping[str, Any]) -> frozenset[str]:
    """A tied output layer, and norms that lie there under two names."""
    names = {"output_layer.weight"} if arguments.get("untie_embeddings_and_output_weights") is False else set()
    for key, info in tensors.items():
        other = tensors.get(fused_name(key) or key)
        if other is not None and other is not info and other.shape == info.shape:
            names.add(key)
    return frozenset(names)


def read_config(directory: Path) -> Mapping[str, Any]:
    """``config.json`` as a mapping; empty if there is none.

    Raises:
        HfConfigError: It is no JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HfConfigError(f"cannot read {path} ({error}); fetch the model again") from error
    if not isinstance(config, dict):
        raise HfConfigError(f"{path} holds a JSON {type(config).__name__}, not an object; fetch the model again")
    return config


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config describes; ``None`` if there is no config, or the model is not supported."""
    try:
        return ModelShape.from_hf_config(config) if config else None
    except ConvertError:
        return None


def describe_quantization(settings: Mapping[str, Any]) -> str:
    """One line about a ``quantization_config``: the method, and what is set of its format, bits and block."""
    found = {**settings, **_weight_settings(settings)}
    names = ("format", "fmt", "num_bits", "bits", "group_size", "weight_block_size", "activation_scheme")
    details = [f"{name} {found[name]}" for name in names if found.get(name) is not None]
    return ", ".join([str(settings.get("quant_method", "unknown method")), *details])


def _packed_bits(settings: Mapping[str, Any]) -> int:
    """Bits of one packed weight; 4 unless the settings say another number."""
    bits = _weight_settings(settings).get("num_bits")
    return bits if isinstance(bits, int) and bits > 0 else 4


def _weight_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors' settings say about the weights of their first group of layers."""
    try:
        weights = next(iter(settings["config_groups"].values()))["weights"]
    except (KeyError, TypeError, AttributeError, StopIteration):
        return {}
    return weights if isinstance(weights, dict) else {}
