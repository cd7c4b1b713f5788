"""Hugging Face model directories: ``config.json``, ``*.safetensors``, tokenizer and other files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from slime_convert.errors import ConvertError, HfConfigError, QuantizationError, WeightError
from slime_convert.files import file_inside, read_json
from slime_convert.files.output import new_directory
from slime_convert.files.partial import Conversion, Partial, emptied, refuse_unfinished
from slime_convert.files.reading import are_equal
from slime_convert.files.tensors import ITEM_BYTES, LazyTensor
from slime_convert.files.writing import NewTensor, write_files
from slime_convert.formats.checkpoint import Weights
from slime_convert.formats.safetensors import (
    _MAX_HEADER_BYTES,
    ADAPTER,
    DEFAULT_SHARD_BYTES,
    INDEX,
    read_directory,
    shard_files,
)
from slime_convert.mapping import hf_copies
from slime_convert.progress import Converted, OnProgress, no_progress
from slime_convert.quantize.expanding import expand
from slime_convert.quantize.formats import QuantizedFormat, format_of, settings_of, without_quantization
from slime_convert.shape import ModelShape

_ADVICE = "give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_TEMPLATES = "additional_chat_templates"
ADAPTER_CONFIG = "adapter_config.json"
LM_HEAD = "lm_head.weight"

FREQUENCIES = ".rotary_emb.inv_freq"
"""The end of names of rotary frequencies. Old Llama files store them; they follow from the config."""


def read_config(directory: Path) -> dict[str, Any]:
    """A model's ``config.json``; a :class:`HfConfigError` if there is none that holds a JSON object."""
    return read_json(directory, "config.json", HfConfigError, _ADVICE)


class HfWeights(Weights):
    """The weights of a Hugging Face directory with ``*.safetensors``, as they are stored.

    Attributes:
        config: ``config.json``; empty without one.
        format: How the weights are quantized, as a text if that is unsupported; ``None`` if they are not.

    Raises:
        HfConfigError: The safetensors files are missing, incomplete or damaged.
        UnfinishedError: A conversion is writing there, or was interrupted.
    """

    naming = "huggingface"

    def __init__(self, directory: Path) -> None:
        refuse_unfinished(directory)
        self.directory = directory
        self._entries = entries = read_directory(directory)
        self.tensors = {name: entry.info for name, entry in entries.items()}
        self.files = {path.name: path.stat().st_size for path in sorted({entry.path for entry in entries.values()})}
        self.config: Mapping[str, Any] = read_config(directory) if (directory / "config.json").exists() else {}
        self.shape = shape_of(self.config)
        tied = self.config.get("tie_word_embeddings")
        self.tied = tied if isinstance(tied, bool) else None
        self.format = _format(self.config)
        quantization = describe_quantization(self.config)
        self.storage = None if quantization is None else f"{quantization}; compared as stored"

    @cached_property
    def _tensors(self) -> Mapping[str, LazyTensor]:
        return {name: entry.tensor() for name, entry in self._entries.items()}

    def tensor(self, name: str) -> LazyTensor:
        """One weight, to be read; a :class:`WeightError` if its type is not one of torch's."""
        tensor = self._tensors[name]
        if tensor.dtype not in ITEM_BYTES:
            allowed = f"allowed: {', '.join(ITEM_BYTES)}; use a model of one of these"
            raise WeightError(f"{name} of {self.directory} has type {tensor.dtype}, which cannot be read; {allowed}")
        return tensor

    def expanded(self) -> HfWeights:
        """The same weights as if they had never been quantized; errors as of ``quantize.expanding.expand``."""
        if self.format is None:
            return self
        known = format_of(self.config, str(self.directory / "config.json"))
        assert known is not None
        other = object.__new__(HfWeights)
        vars(other).update(vars(self))
        other._tensors = expand(self._tensors, known, self.directory)
        other.tensors = {name: tensor.info(name) for name, tensor in other._tensors.items()}
        other.storage, other.format = f"{known}; expanded to bfloat16", None
        return other


def open_model(directory: str | Path) -> HfWeights:
    """The weights of a model: ``bfloat16`` where they are stored in FP8, INT4 or MXFP4, else as they are."""
    path = Path(directory)
    refuse_unfinished(path)
    read_config(path)  # the likely mistake first
    return HfWeights(path).expanded()


def refuse_other_copies(
    tensors: Mapping[str, LazyTensor], shape: ModelShape | None, where: Path | str, *, tied: bool | None = None
) -> None:
    """Refuse copies that differ: an output layer next to tied embeddings (``tied`` if no shape), or a module's."""
    copies = {} if shape is None else hf_copies(shape)
    if tied if shape is None else not shape.untie_embeddings_and_output_weights:
        copies |= {LM_HEAD: "model.embed_tokens.weight"}
    for copy, original in copies.items():
        if {copy, original} <= tensors.keys() and not are_equal(tensors[copy], tensors[original]):
            why = "Megatron's prediction modules share it; convert a model in which the two are equal"
            if copy == LM_HEAD:
                why = "tie_word_embeddings of its config is true; set it to false to keep both, or remove one"
            raise WeightError(f"{copy} of {where} differs from {original}, but {why}")


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config describes; ``None`` if the config is empty or the model unsupported."""
    try:
        return ModelShape.from_hf_config(without_quantization(config)) if config else None
    except ConvertError:
        return None


def _format(config: Mapping[str, Any]) -> QuantizedFormat | str | None:
    """How a model is quantized; what the config says of it if that is unsupported."""
    try:
        return format_of(config, "config.json")
    except QuantizationError:
        return str(settings_of(config))


def describe_quantization(config: Mapping[str, Any]) -> str | None:
    """One line about how a model is quantized, the main settings if that is unsupported; ``None`` if it is not."""
    settings, known = settings_of(config), _format(config)
    if not isinstance(settings, dict) or not settings:
        return None
    if not isinstance(known, str):
        return str(known)
    found = {**settings, **_weight_settings(settings)}
    names = ("format", "fmt", "num_bits", "bits", "group_size", "weight_block_size", "activation_scheme")
    details = [f"{name} {found[name]}" for name in names if found.get(name) is not None]
    return ", ".join([str(settings.get("quant_method", "unknown method")), *details])


def packed_bits(config: Mapping[str, Any]) -> int:
    """Bits of one parameter in tensors named ``*_packed``."""
    settings = settings_of(config)
    bits = _weight_settings(settings).get("num_bits") if isinstance(settings, dict) else None
    return bits if isinstance(bits, int) and 0 < bits <= 64 else 4


def _weight_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compressed-tensors' settings for the weights of the first group of layers."""
    try:
        weights = next(iter(settings["config_groups"].values()))["weights"]
    except (KeyError, TypeError, AttributeError, StopIteration):
        return {}
    return weights if isinstance(weights, dict) else {}


class OutputOptions(TypedDict, total=False):
    """How a conversion writes a Hugging Face directory.

    Attributes:
        force: Replace an earlier output of slime-convert at the same place.
        max_shard_bytes: Largest safetensors file, in bytes of tensors; 5 GiB by default.
        on_progress: Called with what an earlier run left, then as bytes are written.
    """

    force: bool
    max_shard_bytes: int
    on_progress: OnProgress


def write_model(
    tensors: Sequence[NewTensor],
    target: str | Path,
    conversion: Conversion,
    write_others: Callable[[Partial], None],
    *,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> Converted:
    """Write a Hugging Face directory; see :class:`OutputOptions`.

    Args:
        tensors: Its weights, in the order in which they are best written.
        write_others: Writes the files that belong to the weights, such as :func:`copy_model_files`.

    Raises:
        ConvertError: A weight cannot be read, or the output cannot be written.
    """
    conversion = replace(conversion, options={**conversion.options, "max_shard_bytes": max_shard_bytes})
    with new_directory(target, conversion, force=force) as output:
        files, index = shard_files(output.output, tensors, max_shard_bytes)
        if (largest := max(len(file.fixed[0].data) - 8 for file in files)) > _MAX_HEADER_BYTES:
            raise WeightError(
                f"{target} would have a file with a header of {largest} bytes, which no program reads; allowed: "
                f"{_MAX_HEADER_BYTES}; write smaller files with max_shard_bytes=, or give a model of fewer weights"
            )
        output.create(*(file.path.name for file in files))
        write_files(files, on_progress)
        if index is not None:
            output.write(INDEX, index.encode())
        write_others(output)
    nbytes = sum(tensor.info.nbytes for tensor in tensors)
    return Converted(Path(target), len(tensors), nbytes, time.monotonic() - conversion.begun)


def copy_model_files(
    output: Partial,
    *,
    origin: Path,
    config: Mapping[str, Any],
    dtype: str,
    changes: Mapping[str, Any] | None = None,
    with_adapter: bool = True,
) -> None:
    """Copy a model's config, tokenizer, chat template and other files, except weights and hidden files.

    Args:
        config: The ``config.json`` of ``origin``.
        dtype: Element type of the weights, to be set in ``config.json``.
        changes: Further entries of ``config.json``; entries about quantization are removed unless given here.
        with_adapter: Copy a LoRA adapter that the directory holds, which is not part of the model's weights.

    Raises:
        HfConfigError: A file cannot be read, or lies elsewhere.
    """
    names = [path.name for path in origin.iterdir() if not path.is_dir()]
    names += [str(path.relative_to(origin)) for path in (origin / _TEMPLATES).rglob("*") if not path.is_dir()]
    copied = [name for name in sorted(names) if _is_copied(name, with_adapter)]
    for name, copy in zip(copied, output.create(*copied), strict=True):
        with file_inside(origin, name, HfConfigError).open("rb") as file, emptied(copy) as target:
            shutil.copyfileobj(file, target, 2**20)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    changed = without_quantization(config) | ({key: dtype} if key in config else {}) | dict(changes or {})
    if changed != config:
        output.write("config.json", (json.dumps(changed, indent=2) + "\n").encode())


def _is_copied(name: str, with_adapter: bool) -> bool:
    path = Path(name)
    if path.name.startswith(ADAPTER) or path.name == ADAPTER_CONFIG:
        return with_adapter
    return path.suffix not in _WEIGHT_SUFFIXES and not name.endswith(".index.json") and not path.name.startswith(".")
