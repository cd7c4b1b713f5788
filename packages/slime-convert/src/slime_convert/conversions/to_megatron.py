"""Hugging Face directories → Megatron ``torch_dist`` checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slime_convert.conversions.checks import checked_shape, checked_weight, unknown_weights
from slime_convert.conversions.lora import merged
from slime_convert.errors import ShapeMismatchError, WeightError
from slime_convert.families import FAMILIES
from slime_convert.files.output import new_directory
from slime_convert.files.partial import Conversion
from slime_convert.files.tensors import LazyTensor
from slime_convert.files.writing import in_hand, write_files
from slime_convert.formats import hf
from slime_convert.formats.torch_dist_names import RELEASE, TRACKER
from slime_convert.formats.torch_dist_writer import MegatronTensor, new_release
from slime_convert.mapping import WeightMap, check_weight_count, hf_copies, without_missing_modules
from slime_convert.progress import Converted, OnProgress, no_progress
from slime_convert.shape import ModelShape

_MOST_MODULES = 8


def hf_to_torch_dist(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    adapter: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    make_vocab_size_divisible_by: int = 128,
    part_bytes: int | None = None,
    force: bool = False,
    on_progress: OnProgress = no_progress,
) -> Converted:
    """Convert a Hugging Face model into a ``torch_dist`` checkpoint that Megatron loads at any parallelism.

    Quantized weights (block-scaled FP8, packed INT4, MXFP4) become ``bfloat16``.

    Args:
        hf_checkpoint: Directory with ``config.json`` and ``*.safetensors``.
        save: Directory to create.
        adapter: A LoRA adapter of PEFT to be merged in.
        flags: Shape flags to be checked against the config, by ``dest``. ``mtp_num_layers`` 0 omits prediction modules.
        make_vocab_size_divisible_by: The embedding is padded with zero rows to a multiple of this.
        part_bytes: Largest ``.distcp`` file, in bytes of tensors; see
            :func:`slime_convert.formats.torch_dist_writer.new_release`.
        force: Replace an earlier output at ``save``.
        on_progress: Called with what an earlier run left, then as bytes are written.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``save`` then.
    """
    begun, origin = time.monotonic(), Path(hf_checkpoint)
    inputs = (origin,) if adapter is None else (origin, Path(adapter))
    conversion = Conversion("hf-to-torch-dist", inputs, begun=begun)
    shape, _ = checked_shape(origin, flags)
    if type(make_vocab_size_divisible_by) is not int or not 0 < make_vocab_size_divisible_by <= 2**20:
        raise ShapeMismatchError(
            f"make_vocab_size_divisible_by {make_vocab_size_divisible_by} must be a whole number from 1 to {2**20}"
        )
    model = hf.open_model(origin)
    tensors = {name: model.tensor(name) for name in model.tensors}
    if adapter is not None:
        tensors = merged(tensors, Path(adapter))
    check_weight_count(shape, tensors, origin)
    shape, notes = without_missing_modules(shape, tensors, origin)
    if adapter is None and (origin / hf.ADAPTER_CONFIG).exists():
        notes.append(f"the LoRA adapter in {origin} is not merged in; adapter= {origin} does that")
    weight_map = WeightMap(shape, shape.padded_vocab_size(1, make_vocab_size_divisible_by))
    modules = _modules_of(shape, flags)
    if left_out := modules & tensors.keys():
        notes.append(f"{len(left_out)} weights of prediction modules, such as {min(left_out)}, are left out")
    if unknown := unknown_weights(tensors, weight_map) - modules:
        raise WeightError(
            f"{origin} has {len(unknown)} weights that a {shape.family} model does not have, such as {min(unknown)}; "
            "convert a model whose config.json describes all its weights"
        )
    hf.refuse_other_copies(tensors, shape, origin)
    load = partial(checked_weight, tensors, origin)
    weights = [_megatron_tensor(name, weight_map, load) for name in weight_map.megatron_names()]
    args = shape.to_megatron_args() | {
        "padded_vocab_size": weight_map.padded_vocab_size,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "params_dtype": weights[0].tensor.info.dtype,
    }
    conversion = replace(conversion, options={"part_bytes": part_bytes, "args": args})
    with new_directory(save, conversion, force=force) as output:
        directory = output.output / RELEASE
        release = new_release(directory, weights, args, stack_layers=shape.equal_layers, part_bytes=part_bytes)
        output.create(*(f"{RELEASE}/{file.path.name}" for file in release.tensors))
        write_files(release.tensors, on_progress)
        for name, data in release.others.items():
            output.write(f"{RELEASE}/{name}", data)
        output.write(TRACKER, RELEASE.encode())
    written = sum(weight.tensor.info.nbytes for weight in weights)
    return Converted(Path(save), len(weights), written, time.monotonic() - begun, notes=tuple(notes))


def _modules_of(shape: ModelShape, flags: Mapping[str, Any] | None) -> set[str]:
    """Names of the prediction modules' weights that a model may have although they are to be left out."""
    if (flags or {}).get("mtp_num_layers") != 0 or not FAMILIES[shape.family].mtp:
        return set()
    with_modules = WeightMap(replace(shape, mtp_num_layers=_MOST_MODULES))
    return {*with_modules.module_names(), *hf_copies(with_modules.shape)}


def _megatron_tensor(name: str, weight_map: WeightMap, load: Callable[[str], LazyTensor]) -> MegatronTensor:
    parts = weight_map.of_one_type(name)
    dtypes = {load(part).dtype for part in parts}
    if len(dtypes) != 1:
        what = f"{' and '.join(parts)} have types {', '.join(sorted(dtypes))}"
        raise WeightError(f"{what}, but Megatron keeps one type for them; save the model with one type")
    tensor = weight_map.from_hf(name, load)
    return MegatronTensor(
        in_hand(name, tensor),
        stored_as=tuple(weight_map.stored_as(name)),
        expert=weight_map.expert(name),
        sections=tuple(weight_map.stored_sections(name).items()),
    )
