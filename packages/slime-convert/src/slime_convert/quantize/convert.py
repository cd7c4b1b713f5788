"""Whole conversions of Hugging Face directories to FP8 and INT4, and back to bfloat16, on a CPU.

Weights are read and written one by one, so that a model of any size passes through the memory of its largest weight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_convert.errors import QuantizationError, WeightError
from slime_convert.hf import HfReader, copy_model_files
from slime_convert.output import new_directory
from slime_convert.progress import OnProgress, no_progress
from slime_convert.quantize.choice import default_ignore, is_ignored, left_alone, not_ignored, projections
from slime_convert.quantize.formats import (
    Fp8Format,
    Int4Format,
    read_config,
    read_format,
)
from slime_convert.quantize.fp8 import BLOCK, blocks_of, quantize_fp8
from slime_convert.quantize.int4 import GROUP_SIZES, quantize_int4
from slime_convert.quantize.reader import Fp8Reader, Int4Reader, open_unquantized
from slime_convert.shard_file import TensorSpec
from slime_convert.shards import DEFAULT_SHARD_BYTES, Step, write_shards
from slime_convert.unfinished import Conversion

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def hf_to_fp8(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Quantize a model's projections to E4M3 with a float32 ``weight_scale_inv`` per block of 128 by 128.

    Args:
        hf_checkpoint: Directory with ``config.json`` and unquantized ``*.safetensors``.
        save: Directory to create.
        force: Replace an earlier model at ``save``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``save`` then.
    """
    with open_unquantized(hf_checkpoint) as reader:
        specs = {name: reader.spec(name) for name in reader.names_in_order}
        shapes = {name: spec.shape for name, spec in specs.items()}
        chosen = set(projections(shapes))
        steps = [
            _fp8_step(reader, spec) if name in chosen else _copy_step(reader, spec) for name, spec in specs.items()
        ]
        config = Fp8Format(BLOCK).to_config(left_alone(shapes, chosen))
        dtype = specs[min(chosen)].dtype
        _write(reader, steps, save, dtype, config, force, max_shard_bytes, on_progress)


def hf_to_int4(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    group_size: int = 32,
    ignore: Sequence[str] | None = None,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Quantize a model's projections to packed INT4, rounding to nearest; no calibration.

    Args:
        hf_checkpoint: Directory with ``config.json`` and unquantized ``*.safetensors``.
        save: Directory to create.
        group_size: Columns that share a scale: 32 or 128.
        ignore: Modules to leave as they are: names, or ``re:`` and a pattern. By default all but the routed experts
            if the model has any, as in Kimi-K2, else the output layer.
        force: Replace an earlier model at ``save``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``save`` then.
    """
    if group_size not in GROUP_SIZES:
        raise QuantizationError(
            f"group size {group_size} is not supported; allowed: {', '.join(map(str, GROUP_SIZES))}"
        )
    with open_unquantized(hf_checkpoint) as reader:
        specs = {name: reader.spec(name) for name in reader.names_in_order}
        shapes = {name: spec.shape for name, spec in specs.items()}
        names = projections(shapes)
        rules = default_ignore(names) if ignore is None else tuple(ignore)
        chosen = set(not_ignored(names, rules))
        steps = [
            _int4_step(reader, spec, group_size) if name in chosen else _copy_step(reader, spec)
            for name, spec in specs.items()
        ]
        others = [
            module for module in left_alone(shapes, chosen) if not any(is_ignored(module, rule) for rule in rules)
        ]
        config = Int4Format(group_size).to_config([*rules, *others])
        dtype = specs[min(chosen)].dtype
        _write(reader, steps, save, dtype, config, force, max_shard_bytes, on_progress)


def fp8_to_bf16(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Expand block-scaled FP8 weights, such as DeepSeek-V3's, to bfloat16; the others stay as they are.

    Args:
        hf_checkpoint: Directory with ``config.json`` and ``*.safetensors``.
        save: Directory to create.
        force: Replace an earlier model at ``save``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``save`` then.
    """
    format_ = read_format(Path(hf_checkpoint))
    if not isinstance(format_, Fp8Format):
        raise _other_format(Path(hf_checkpoint), format_, "fp8")
    with Fp8Reader(hf_checkpoint, format_) as reader:
        _expand(reader, save, force, max_shard_bytes, on_progress)


def int4_to_bf16(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Expand packed INT4 weights, such as Kimi-K2's, to bfloat16; the others stay as they are.

    Args:
        hf_checkpoint: Directory with ``config.json`` and ``*.safetensors``.
        save: Directory to create.
        force: Replace an earlier model at ``save``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``save`` then.
    """
    format_ = read_format(Path(hf_checkpoint))
    if not isinstance(format_, Int4Format):
        raise _other_format(Path(hf_checkpoint), format_, "int4")
    with Int4Reader(hf_checkpoint, format_) as reader:
        _expand(reader, save, force, max_shard_bytes, on_progress)


def _other_format(directory: Path, format_: Fp8Format | Int4Format | None, wanted: str) -> QuantizationError:
    if format_ is None:
        return QuantizationError(f"{directory / 'config.json'} has no quantization_config; give a quantized model")
    other = "int4" if wanted == "fp8" else "fp8"
    return QuantizationError(f"{directory} is quantized to {other}, not {wanted}; use slime-convert {other}-to-bf16")


def _expand(reader: HfReader, save: str | Path, force: bool, max_shard_bytes: int, on_progress: OnProgress) -> None:
    steps = [_copy_step(reader, reader.spec(name)) for name in reader.names_in_order]
    _write(reader, steps, save, torch.bfloat16, None, force, max_shard_bytes, on_progress)


def _copy_step(reader: HfReader, spec: TensorSpec) -> Step:
    return Step((spec,), lambda: (reader.load(spec.name),))


def _fp8_step(reader: HfReader, spec: TensorSpec) -> Step:
    _refuse_type(spec)
    scale = TensorSpec(f"{spec.name}_scale_inv", torch.float32, blocks_of(spec.shape[0], spec.shape[1]))
    weight = TensorSpec(spec.name, torch.float8_e4m3fn, spec.shape)
    return Step((weight, scale), lambda: quantize_fp8(reader.load(spec.name), name=spec.name))


def _int4_step(reader: HfReader, spec: TensorSpec, group_size: int) -> Step:
    _refuse_type(spec)
    rows, columns = spec.shape
    if columns % group_size:
        raise WeightError(
            f"{spec.name} has {columns} columns, which groups of {group_size} do not divide; "
            "choose another group size, or leave the weight as it is with --ignore"
        )

    def make() -> tuple[Tensor, ...]:
        return (*quantize_int4(reader.load(spec.name), group_size, name=spec.name), torch.tensor(spec.shape))

    packed = TensorSpec(f"{spec.name}_packed", torch.int32, (rows, columns // 8))
    scale = TensorSpec(f"{spec.name}_scale", spec.dtype, (rows, columns // group_size))
    return Step((packed, scale, TensorSpec(f"{spec.name}_shape", torch.int64, (2,))), make)


def _refuse_type(spec: TensorSpec) -> None:
    if spec.dtype not in _FLOATS:
        raise WeightError(
            f"{spec.name} has type {spec.dtype}; allowed: {', '.join(map(str, _FLOATS))}; save the model as bfloat16"
        )


def _write(
    reader: HfReader,
    steps: Sequence[Step],
    save: str | Path,
    dtype: torch.dtype,
    quantization: dict[str, Any] | None,
    force: bool,
    max_shard_bytes: int,
    on_progress: OnProgress,
) -> None:
    origin = reader.directory
    # What is quantized, and how, stands in the config.
    conversion = Conversion("quantize", (origin,), {"config": quantization, "max_shard_bytes": max_shard_bytes})
    with new_directory(save, conversion, force=force, marker="config.json") as unfinished:
        directory = unfinished.output
        write_shards(directory, steps, max_shard_bytes, on_progress)
        copy_model_files(origin, directory, dtype)
        if quantization is not None:
            config = read_config(directory) | {"quantization_config": quantization}
            (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
