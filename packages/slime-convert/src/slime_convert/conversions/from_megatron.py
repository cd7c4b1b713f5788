"""Megatron checkpoints, ``torch_dist`` and legacy ``torch`` → Hugging Face directories."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Unpack

from slime_convert.conversions.checks import checked_shape, checked_type, checked_weight, unknown_weights
from slime_convert.errors import CheckpointError
from slime_convert.files.partial import Conversion
from slime_convert.files.reading import are_equal
from slime_convert.files.tensors import LazyTensor, TensorInfo, narrow
from slime_convert.files.writing import NewTensor, in_hand
from slime_convert.formats import LEGACY, TORCH_DIST, detect, hf
from slime_convert.formats.checkpoint import VOCABULARY_WEIGHTS, Weights
from slime_convert.formats.safetensors import INDEX
from slime_convert.mapping import WeightMap, check_weight_count, hf_copies, without_missing_modules
from slime_convert.progress import Converted
from slime_convert.shape import check_args


def torch_dist_to_hf(
    input_dir: str | Path, output_dir: str | Path, origin_hf_dir: str | Path, **options: Any
) -> Converted:
    """:func:`megatron_to_hf` of a ``torch_dist`` checkpoint; of another format it is refused."""
    detect(input_dir, (TORCH_DIST,))
    return megatron_to_hf(input_dir, output_dir, origin_hf_dir, **options)


def megatron_to_hf(
    load: str | Path,
    output_dir: str | Path,
    origin_hf_dir: str | Path,
    *,
    flags: Mapping[str, Any] | None = None,
    add_missing_from_origin_hf: bool = False,
    **output: Unpack[hf.OutputOptions],
) -> Converted:
    """Convert a Megatron checkpoint, converted or written by a trainer, into a Hugging Face directory.

    Args:
        load: The checkpoint (``torch_dist`` or legacy ``torch``), or one iteration of it. Optimizer state is skipped.
        output_dir: Directory to create.
        origin_hf_dir: The Hugging Face model that training began with: gives config, tokenizer and chat template. If it
            is quantized, the written config is that of an unquantized model.
        flags: Shape flags to be checked against the config, by ``dest``.
        add_missing_from_origin_hf: Copy missing weights from ``origin_hf_dir``; quantized ones become ``bfloat16``.
        output: ``force``, ``max_shard_bytes``, ``on_progress``; see :class:`slime_convert.OutputOptions`.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``output_dir`` then.
    """
    begun, origin = time.monotonic(), Path(origin_hf_dir)
    options = {"add_missing": add_missing_from_origin_hf}
    conversion = Conversion("megatron-to-hf", (origin,), options, begun)
    shape, config = checked_shape(origin, flags)
    form, iteration = detect(load, (LEGACY, TORCH_DIST))
    conversion = conversion.also(iteration)
    checkpoint = form.open(iteration)
    original = hf.open_model(origin) if add_missing_from_origin_hf else _stored_model(origin)
    check_weight_count(shape, checkpoint.tensors, checkpoint.directory)
    held = [*checkpoint.tensors, *(original.tensors if original else ())]
    shape, notes = without_missing_modules(shape, held, checkpoint.directory)
    check_args(shape.to_megatron_args(), checkpoint.arguments, checkpoint.directory)
    weight_map = WeightMap(shape)
    found = checkpoint.named(weight_map)
    _refuse_unused(checkpoint, found, weight_map)
    names = list(weight_map.megatron_names())
    lacking = [name for name in names if name not in found]
    if lacking and (not add_missing_from_origin_hf or lacking == names):
        raise CheckpointError(
            f"{checkpoint.directory} has no weight {lacking[0]} ({len(lacking)} such weights); use the checkpoint and "
            "the config of one model, or copy such weights with add_missing_from_origin_hf=True"
        )
    for name, info in found.items():
        checked_type(name, info, checkpoint.directory)
    written = _from_checkpoint(weight_map, checkpoint, found, original)
    copied = _from_original(weight_map, original, written) if add_missing_from_origin_hf and original else []
    dtype = next(iter(found.values())).dtype
    others = partial(hf.copy_model_files, origin=origin, config=config, dtype=dtype, with_adapter=False)
    converted = hf.write_model([*copied, *written.values()], output_dir, conversion, others, **output)
    if (origin / hf.ADAPTER_CONFIG).exists():
        notes.append(f"the LoRA adapter in {origin} was trained on other weights; it is left out")
    copies = tuple(tensor.info.name for tensor in copied)
    return replace(converted, copied=copies, notes=(*notes, *checkpoint.notes))


def _stored_model(directory: Path) -> hf.HfWeights | None:
    """The weights next to a config, if there are any: only their names are read."""
    has_weights = any(directory.glob("*.safetensors")) or (directory / INDEX).exists()
    return hf.HfWeights(directory) if has_weights else None


def _refuse_unused(checkpoint: Weights, found: Mapping[str, TensorInfo], weight_map: WeightMap) -> None:
    output, embedding = VOCABULARY_WEIGHTS
    unused = found.keys() - set(weight_map.megatron_names())
    if not weight_map.shape.untie_embeddings_and_output_weights and {output, embedding} <= found.keys():
        unused -= {output}
        rows = weight_map.shape.vocab_size
        both = [checkpoint.tensor(name) for name in (output, embedding)]
        if not are_equal(*(narrow(one, 0, 0, min(rows, one.shape[0])) if one.shape else one for one in both)):
            raise CheckpointError(
                f"{output} of {checkpoint.directory} differs from {embedding}, but tie_word_embeddings of the config "
                "is true; give a config in which it is false to keep both"
            )
    if any(name.endswith((".lora_A", ".lora_B")) for name in unused):
        raise CheckpointError(
            f"{checkpoint.directory} holds LoRA adapters beside the base model's weights; merge its adapter/ into the "
            "Hugging Face model by slime-convert merge-lora"
        )
    if unused:
        raise CheckpointError(
            f"{checkpoint.directory} has {len(unused)} weights that the given Hugging Face config does not describe, "
            f"such as {min(unused)}; give the Hugging Face directory that training began with"
        )


def _from_checkpoint(
    weight_map: WeightMap, checkpoint: Weights, found: Mapping[str, TensorInfo], original: hf.HfWeights | None
) -> dict[str, NewTensor]:
    """The Hugging Face weights inside a checkpoint's, by name, with the copies that an original model has."""

    # The parts of a weight are written one after another.
    @lru_cache(maxsize=4)
    def load(name: str) -> LazyTensor:
        return checkpoint.tensor(name)

    def outline(source: str, name: str) -> LazyTensor:
        if name not in found:  # copied whole from the original model, what the checkpoint holds of it would be lost
            lost = [part for part in weight_map.megatron_parts(source) if part not in found] or [name]
            raise CheckpointError(
                f"{checkpoint.directory} holds {source} only in part: it lacks {', '.join(lost[:3])} ({len(lost)} such "
                "parts); use a complete checkpoint"
            )
        return LazyTensor.zeros(found[name].dtype, found[name].shape)

    sources = {name: name for name in weight_map.hf_names() if found.keys() & {*weight_map.megatron_parts(name)}}
    for copy, source in hf_copies(weight_map.shape).items():
        if source in sources and (original is None or copy in original.tensors):
            sources[copy] = source
    return {
        name: NewTensor(
            weight_map.huggingface(source, partial(outline, source)).info(name),
            partial(weight_map.huggingface, source, load),
        )
        for name, source in sources.items()
    }


def _from_original(weight_map: WeightMap, original: hf.HfWeights, written: Iterable[str]) -> list[NewTensor]:
    """Weights of the original model that come from no weight of a checkpoint, in the model's order."""
    carried = {*written, *hf_copies(weight_map.shape)}
    names = [name for name in weight_map.hf_names() if name not in carried]
    names += sorted(unknown_weights(original.tensors, weight_map))
    tensors = {name: original.tensor(name) for name in original.tensors}
    return [in_hand(name, checked_weight(tensors, original.directory, name)) for name in names]
