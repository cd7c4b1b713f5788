"""Quantized checkpoints: what ``quantization_config`` says of them, and their weights in ``bfloat16``.

``quantize.convert`` converts whole directories; ``quantize.numbers`` single weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_convert.errors import HfConfigError, QuantizationError, WeightError
from slime_convert.files import read_json
from slime_convert.files.partial import refuse_unfinished
from slime_convert.files.reading import TensorReader, computed
from slime_convert.files.tensors import LazyTensor, concat, narrow

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name
_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "actorder": None}
_INSTEAD = "convert the model's unquantized release"


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

    Raises:
        HfConfigError: There is no readable ``config.json``.
        QuantizationError: They are quantized in a way that is not supported.
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
        f"'compressed-tensors' with format pack-quantized, 'mxfp4'; {_INSTEAD}"
    )


def _fp8(settings: Mapping[str, Any], where: str) -> Fp8Format:
    _need(settings.get("fmt", "e4m3"), "e4m3", "fmt", where)
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise QuantizationError(
            f"weight_block_size {block!r} in {where} is not supported; allowed: two whole numbers of 1 or more, "
            f"such as [128, 128]; {_INSTEAD}"
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
        raise QuantizationError(f"config_groups in {where} is not supported; allowed: exactly one group; {_INSTEAD}")
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
        raise QuantizationError(f"group_size {size!r} in {where} must be a whole number of 1 or more; {_INSTEAD}")
    return Int4Format(size)


def _need(given: Any, allowed: Any, key: str, where: str) -> None:
    if given != allowed or type(given) is not type(allowed):
        raise QuantizationError(f"{key} {given!r} in {where} is not supported; allowed: {allowed!r}; {_INSTEAD}")


SCALE_INV = "_scale_inv"
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
BLOCKS, SCALES = "_blocks", "_scales"
_PARTS = {Fp8Format: ("", SCALE_INV), Int4Format: (PACKED, SCALE, SHAPE), Mxfp4Format: (BLOCKS, SCALES)}


def expand(stored: Mapping[str, LazyTensor], form: QuantizedFormat, directory: Path) -> dict[str, LazyTensor]:
    """The weights of a quantized model in ``bfloat16``, computed when they are needed.

    Args:
        stored: Its tensors by name. The weights come in the same order.
        form: How they are quantized.
        directory: Where they are, for messages.

    Raises:
        QuantizationError: No weight is quantized.
        WeightError: A part of a quantized weight is missing, or does not fit the others.
    """
    first, *others = _PARTS[type(form)]
    if isinstance(form, Fp8Format):
        quantized = [name for name, tensor in stored.items() if tensor.dtype == "float8_e4m3fn"]
        held = {*quantized, *(name for name in stored if name.endswith(SCALE_INV))}
    else:
        quantized = [name.removesuffix(first) for name in stored if name.endswith(first)]
        is_mxfp4 = isinstance(form, Mxfp4Format)
        held = {name for name in stored if (name.endswith((BLOCKS, SCALES)) if is_mxfp4 else is_packed_part(name))}
    _refuse_incomplete(directory, {name + part for name in quantized for part in (first, *others)}, held)
    if first and (twice := set(quantized) & stored.keys()):
        raise WeightError(
            f"{directory} has {min(twice)} both quantized and not ({len(twice)} such weights); fetch the model again"
        )
    expanded: dict[str, LazyTensor] = {}
    names = {name + first: name for name in quantized}
    with TensorReader() as reader:
        for stored_name, tensor in stored.items():
            if name := names.get(stored_name):
                parts = [tensor, *(stored[name + part] for part in others)]
                if isinstance(form, Fp8Format):
                    expanded[name] = _fp8_weight(name, directory, form.block, *parts)
                elif isinstance(form, Int4Format):
                    expanded[name] = _int4_weight(name, directory, form.group_size, reader, *parts)
                else:
                    expanded[name] = _mxfp4_weight(name, directory, *parts)
            elif stored_name not in held:
                expanded[stored_name] = tensor
        reader.finish()
    return expanded


def is_packed_part(name: str) -> bool:
    """Whether a tensor of an INT4 checkpoint is a part of a packed weight, by its name."""
    return name.endswith(PACKED) or ".weight_" in name


def _refuse_incomplete(directory: Path, wanted: set[str], held: set[str]) -> None:
    if not wanted:
        raise QuantizationError(f"{directory} has no quantized weights, but a quantization_config; fetch it again")
    if missing := wanted - held:
        raise WeightError(
            f"{directory} lacks {min(missing)} and {len(missing) - 1} more parts of quantized weights; fetch it again"
        )
    if extra := held - wanted:
        raise WeightError(
            f"{directory} has {min(extra)} and {len(extra) - 1} more parts that belong to no quantized weight of this "
            f"format (it has no zero points and no activation order); {_INSTEAD}"
        )


def need_whole_groups(name: str, columns: int, group_size: int) -> None:
    """Refuse a weight that groups of INT4 do not divide (:class:`WeightError`)."""
    if columns % group_size:
        raise WeightError(
            f"{name} has {columns} columns, which groups of {group_size} do not divide; "
            "choose another group size, or leave the weight as it is with ignore="
        )


def run(function: str, *tensors: Tensor, **options: Any) -> Any:
    """Call a function of :mod:`slime_convert.quantize.numbers`, which needs torch."""
    from slime_convert.quantize import numbers

    return getattr(numbers, function)(*tensors, **options)


def _fp8_weight(name: str, directory: Path, block: tuple[int, int], q: LazyTensor, scale: LazyTensor) -> LazyTensor:
    if len(q.shape) != 2:
        raise WeightError(f"{name} of {directory} is FP8 but not a matrix; fetch the model again")
    return computed("bfloat16", q.shape, partial(run, "dequantize_fp8", block=block, name=name), q, scale)


def _int4_weight(
    name: str, where: Path, group: int, reader: TensorReader, packed: LazyTensor, scale: LazyTensor, sizes: LazyTensor
) -> LazyTensor:
    item = {"int32": 4, "int64": 8}.get(sizes.dtype)
    shape: tuple[int, ...] = ()
    if item and len(sizes.shape) == 1 and sizes.shape[0] <= 8:
        data = reader.read(sizes)
        shape = tuple(int.from_bytes(data[i : i + item], "little", signed=True) for i in range(0, len(data), item))
    if len(shape) != 2 or min(shape) < 0 or packed.dtype != "int32" or packed.shape[:-1] != shape[:-1]:
        raise WeightError(
            f"{name}{PACKED} of {where} has type {packed.dtype} and shape {packed.shape}, which does not fit "
            f"{name}{SHAPE} {list(shape)}; allowed: int32 words of two-dimensional weights; fetch the model again"
        )
    wanted = -(-shape[1] // 8)  # before anything of that size is built
    if packed.shape[1:] != (wanted,):
        raise WeightError(
            f"{name}{PACKED} of {where} has {packed.shape[1:]} words in a row, and {shape[1]} columns need "
            f"{wanted}; fetch the model again"
        )
    compute = partial(run, "dequantize_int4", columns=shape[1], group_size=group, name=name)
    return computed("bfloat16", shape, compute, packed, scale)


def _mxfp4_weight(name: str, directory: Path, blocks: LazyTensor, scales: LazyTensor) -> LazyTensor:
    if {blocks.dtype, scales.dtype} != {"uint8"} or blocks.shape[:-1] != scales.shape or len(scales.shape) != 3:
        raise WeightError(
            f"{name}{BLOCKS} of {directory} has type {blocks.dtype} and shape {blocks.shape}, its scales "
            f"{scales.dtype} {scales.shape}; allowed: uint8 (experts, rows, blocks, bytes) and a scale for each "
            "block; fetch the model again"
        )
    experts, rows, per_row, width = blocks.shape
    compute, shape = partial(run, "dequantize_mxfp4", name=name), (1, per_row * width * 2, rows)
    # One expert at a time: in bfloat16 they take four times the room.
    pairs = [[narrow(tensor, 0, expert, 1) for tensor in (blocks, scales)] for expert in range(experts)]
    parts = [computed("bfloat16", shape, compute, *pair) for pair in pairs]
    return concat(parts) if parts else LazyTensor("bfloat16", (0, *shape[1:]), ())
