"""Whole conversions between Hugging Face directories and ``torch_dist`` checkpoints, without GPU or Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_convert.errors import CheckpointError, ShapeMismatchError, WeightError
from slime_convert.hf import DEFAULT_SHARD_BYTES, HfReader, copy_model_files, write_weights
from slime_convert.mapping import WeightMap
from slime_convert.output import new_directory
from slime_convert.progress import OnProgress, no_progress
from slime_convert.shape import ModelShape, check_flags
from slime_convert.torch_dist import TorchDistReader, WeightSource, write_release
from slime_convert.torch_dist.layout import TRACKER


def hf_to_torch_dist(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    flags: Mapping[str, Any] | None = None,
    make_vocab_size_divisible_by: int = 128,
    force: bool = False,
    on_progress: OnProgress = no_progress,
) -> None:
    """Convert a Hugging Face model into a ``torch_dist`` checkpoint that Megatron loads at any parallelism.

    Args:
        hf_checkpoint: Directory with ``config.json`` and ``*.safetensors``.
        save: Directory to create.
        flags: Shape flags to be checked against the config, by ``dest``.
        make_vocab_size_divisible_by: The embedding is padded with zero rows to a multiple of this.
        force: Replace an earlier checkpoint at ``save``.
        on_progress: Called after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is left at ``save`` then.
    """
    origin = Path(hf_checkpoint)
    shape = ModelShape.from_hf_config(origin)
    check_flags(shape, flags or {})
    padded = shape.padded_vocab_size(1, make_vocab_size_divisible_by)
    weight_map = WeightMap(shape, padded)
    with HfReader(origin) as reader:
        _refuse_unknown(reader, weight_map)
        sources = [_source(name, weight_map, reader) for name in weight_map.megatron_names()]
        with new_directory(save, force=force, keep=frozenset({origin}), marker=TRACKER) as directory:
            args = shape.to_megatron_args() | {
                "padded_vocab_size": padded,
                "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
                "params_dtype": str(sources[0].dtype).removeprefix("torch."),
            }
            write_release(directory, sources, args, on_progress)


def torch_dist_to_hf(
    input_dir: str | Path,
    output_dir: str | Path,
    origin_hf_dir: str | Path,
    *,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Convert a ``torch_dist`` checkpoint, converted or written by a trainer, into a Hugging Face directory.

    Args:
        input_dir: The checkpoint, or one iteration of it. Optimizer state is skipped.
        output_dir: Directory to create.
        origin_hf_dir: The Hugging Face model that training began with: gives config, tokenizer and chat template.
        force: Replace an earlier model at ``output_dir``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is left at ``output_dir`` then.
    """
    origin = Path(origin_hf_dir)
    weight_map = WeightMap(ModelShape.from_hf_config(origin))
    reader = TorchDistReader(input_dir)
    check_args(weight_map.shape, reader.args(), reader.directory)
    _refuse_unused(reader, weight_map)
    dtype = reader.dtype(next(weight_map.megatron_names()))
    keep = frozenset({origin, Path(input_dir)})
    with new_directory(output_dir, force=force, keep=keep, marker="config.json") as directory:
        write_weights(directory, _hf_weights(reader, weight_map, on_progress), max_shard_bytes)
        copy_model_files(origin, directory, dtype)


def check_args(shape: ModelShape, args: Mapping[str, Any], where: Path) -> None:
    """Compare the arguments that a checkpoint records with a shape; arguments that are not recorded pass.

    Raises:
        ShapeMismatchError: One message with every contradiction.
    """
    expected = shape.to_megatron_args()
    # Megatron ignores the group count without grouped-query attention, and pads or shortens these two at will.
    loose = {"max_position_embeddings", "vocab_size"}
    if not shape.use_rope_scaling:
        loose.add("rope_scaling_factor")
    if not expected["group_query_attention"]:
        loose |= {"group_query_attention", "num_query_groups"}
    wrong = [
        f"{name} {args[name]} (config: {value})"
        for name, value in expected.items()
        if name not in loose and args.get(name) is not None and not _same(args[name], value)
    ]
    if wrong:
        raise ShapeMismatchError(
            f"{where} was written by another model than the given Hugging Face config describes: {'; '.join(wrong)}; "
            "give the Hugging Face directory that training began with"
        )


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(given, int | float):
        return math.isclose(given, expected, rel_tol=1e-6)
    return bool(given == expected)


def _source(name: str, weight_map: WeightMap, reader: HfReader) -> WeightSource:
    dtypes = {reader.dtype(part) for part in weight_map.hf_parts(name)}
    if len(dtypes) != 1:
        raise WeightError(
            f"{' and '.join(weight_map.hf_parts(name))} have types {sorted(map(str, dtypes))} but make up one "
            "Megatron weight; save the model with one type"
        )

    def load() -> Tensor:
        return weight_map.from_hf(name, reader.load)

    return WeightSource(name, weight_map.megatron_shape(name), dtypes.pop(), load)


def _refuse_unknown(reader: HfReader, weight_map: WeightMap) -> None:
    """Refuse weights that no rule carries: dropping them silently would change the model."""
    unknown = {
        name
        for name in reader.names - set(weight_map.hf_names())
        # A tied model may store its output layer a second time; old Llama files store the rotary frequencies.
        if name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq")
    }
    if unknown:
        raise WeightError(
            f"{reader.directory} has {len(unknown)} weights that a {weight_map.shape.family} model does not have, "
            f"such as {min(unknown)}; convert a model whose config.json describes all its weights"
        )


def _refuse_unused(reader: TorchDistReader, weight_map: WeightMap) -> None:
    """Refuse a checkpoint with weights that the config does not describe."""
    used = {key for name in weight_map.megatron_names() for key in reader.find(name).keys}
    unused = reader.weight_keys - used - {"output_layer.weight"}
    if unused:
        raise CheckpointError(
            f"{reader.directory} has {len(unused)} weights that the given Hugging Face config does not describe, "
            f"such as {min(unused)}; give the Hugging Face directory that training began with"
        )


def _hf_weights(
    reader: TorchDistReader, weight_map: WeightMap, on_progress: OnProgress
) -> Iterator[tuple[str, Tensor]]:
    names = list(weight_map.megatron_names())
    sizes = [torch.Size(reader.shape(name)).numel() * reader.dtype(name).itemsize for name in names]
    done = 0
    for name, size in zip(names, sizes, strict=True):
        yield from weight_map.to_hf(name, reader.load(name))
        done += size
        on_progress(done, sum(sizes))
