"""Whole conversions between Hugging Face directories and Megatron checkpoints, without GPU, Megatron or torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Unpack

from slime_convert.errors import CheckpointError, ShapeMismatchError, WeightError
from slime_convert.families import FAMILIES
from slime_convert.files.output import new_directory
from slime_convert.files.partial import Conversion, refuse_unfinished
from slime_convert.files.reading import are_equal
from slime_convert.files.tensors import LazyTensor, TensorInfo, narrow
from slime_convert.files.writing import NewTensor, in_hand, write_files
from slime_convert.formats import LEGACY, TORCH_DIST, detect, hf
from slime_convert.formats.checkpoint import VOCABULARY_WEIGHTS, Weights
from slime_convert.formats.safetensors import INDEX
from slime_convert.formats.torch_dist_names import RELEASE, TRACKER
from slime_convert.formats.torch_dist_writer import MegatronTensor, new_release
from slime_convert.lora import merged
from slime_convert.mapping import WeightMap, check_weight_count, hf_copies
from slime_convert.progress import Converted, OnProgress, no_progress
from slime_convert.shape import ModelShape, check_flags

_FLOATS = ("bfloat16", "float16", "float32", "float64")
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
        flags: Shape flags to be checked against the config, by ``dest``. ``mtp_num_layers`` 0 leaves prediction modules
            out.
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
    shape, _ = _checked_shape(origin, flags)
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
    load = partial(_load, tensors, origin)
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
        add_missing_from_origin_hf: Copy weights that the checkpoint lacks from ``origin_hf_dir``; quantized ones become
            ``bfloat16``.
        output: ``force``, ``max_shard_bytes``, ``on_progress``; see :class:`slime_convert.OutputOptions`.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``output_dir`` then.
    """
    begun, origin = time.monotonic(), Path(origin_hf_dir)
    options = {"add_missing": add_missing_from_origin_hf}
    conversion = Conversion("megatron-to-hf", (origin,), options, begun)
    shape, config = _checked_shape(origin, flags)
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


def checked_type(name: str, tensor: TensorInfo | LazyTensor, where: Path) -> None:
    """Refuse a weight whose type is not one of plain floating-point numbers (:class:`WeightError`)."""
    if tensor.dtype not in _FLOATS:
        raise WeightError(
            f"{name} of {where} has type {tensor.dtype}; allowed: {', '.join(_FLOATS)}; convert an unquantized model"
        )


def _checked_shape(directory: Path, flags: Mapping[str, Any] | None) -> tuple[ModelShape, dict[str, Any]]:
    """A directory's config, and the shape that it describes; likely mistakes are reported before all else is read."""
    refuse_unfinished(directory)
    ModelShape.from_hf_config(directory)  # its errors name the file
    config = hf.read_config(directory)
    shape = ModelShape.from_hf_config(config)
    given = dict(flags or {})
    if given.get("mtp_num_layers") == 0:
        shape, given["mtp_num_layers"] = replace(shape, mtp_num_layers=0), None
    check_flags(shape, given)
    return shape, config


def _stored_model(directory: Path) -> hf.HfWeights | None:
    """The weights next to a config, if there are any: only their names are read."""
    has_weights = any(directory.glob("*.safetensors")) or (directory / INDEX).exists()
    return hf.HfWeights(directory) if has_weights else None


def _modules_of(shape: ModelShape, flags: Mapping[str, Any] | None) -> set[str]:
    """Names of the prediction modules' weights that a model may have although they are to be left out."""
    if (flags or {}).get("mtp_num_layers") != 0 or not FAMILIES[shape.family].mtp:
        return set()
    with_modules = WeightMap(replace(shape, mtp_num_layers=_MOST_MODULES))
    return {*with_modules.module_names(), *hf_copies(with_modules.shape)}


def without_missing_modules(shape: ModelShape, names: Collection[str], where: Path) -> tuple[ModelShape, list[str]]:
    """The shape, without prediction modules if their weights are missing (transformers saves none), and a note."""
    modules = set(WeightMap(shape).module_names()) if shape.mtp_num_layers else set()
    if not modules or any(name in modules or name.startswith("mtp.") for name in names):
        return shape, []
    note = f"{where} lacks the model's prediction modules ({shape.mtp_num_layers}); the output is without them too"
    return replace(shape, mtp_num_layers=0), [note]


def _load(tensors: Mapping[str, LazyTensor], where: Path, name: str) -> LazyTensor:
    if name not in tensors:
        raise WeightError(f"{where} has no weight {name}, which its config.json asks for; fetch the model again")
    checked_type(name, tensors[name], where)
    return tensors[name]


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


def unknown_weights(tensors: Iterable[str], weight_map: WeightMap) -> set[str]:
    """Names of a Hugging Face model's weights that no rule carries."""
    known = {*weight_map.hf_names(), *hf_copies(weight_map.shape), hf.LM_HEAD}
    return {name for name in tensors if name not in known and not name.endswith(hf.FREQUENCIES)}


def check_args(
    expected: Mapping[str, Any], args: Mapping[str, Any], where: Path, *, same_vocabulary: bool = False
) -> None:
    """Refuse a checkpoint whose recorded arguments contradict a model's, with all contradictions in one message.

    Arguments that are not recorded pass. The model's are those of :meth:`slime_convert.ModelShape.to_megatron_args`.
    ``same_vocabulary`` is for arguments whose vocabulary is the model's too, without Megatron's padding.
    """
    # Megatron pads or shortens these two at will.
    loose = {"max_position_embeddings"} | (set() if same_vocabulary else {"vocab_size"})
    # Kimi-K2's makers advise calling it deepseek_v3 where kimi_k2 is not known: its weights are the same.
    family, recorded = (FAMILIES.get(str(side.get("hf_model_type"))) for side in (expected, args))
    if family and recorded and family.layer is recorded.layer:
        loose.add("hf_model_type")
    # Megatron does not read these, or they change nothing.
    if not expected["use_rope_scaling"]:
        loose.add("rope_scaling_factor")
    if expected.get("multi_latent_attention"):
        loose |= {"kv_channels", "num_query_groups", "group_query_attention"}
    if expected.get("rope_type") != "yarn":
        loose |= {"rope_type", "rotary_scaling_factor", "original_max_position_embeddings"}
        loose |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if expected.get("moe_router_score_function") == "sigmoid":
        loose.add("moe_router_pre_softmax")
    if expected.get("moe_layer_freq") == 1:
        loose.add("moe_layer_freq")
    if not expected["group_query_attention"]:
        loose |= {"group_query_attention", "num_query_groups"}
    if args.get("mtp_num_layers") == 0:  # the modules' weights are missed, or copied, by name
        loose.add("mtp_num_layers")
    wrong = [
        f"{name} {str(args[name])[:200]} (config: {value})"
        for name, value in expected.items()
        if name not in loose and args.get(name) is not None and not _same(args[name], value)
    ]
    _refuse_other_meaning(expected, args, where)
    if wrong:
        raise ShapeMismatchError(
            f"{where} was written by another model than the given Hugging Face config describes: {'; '.join(wrong)}; "
            "give the Hugging Face directory that training began with"
        )


def _refuse_other_meaning(expected: Mapping[str, Any], args: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint whose weights have the usual shapes, but stand for something else.

    It has norms less one, or may have the rows of gate and up projections in blocks: Megatron wrote such rows as the
    training had them, and later in the usual order, and records no difference. Or its indexer's rows are in the order
    of megatron-core 0.19.
    """
    names = ["moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"]
    if not expected.get("layernorm_zero_centered_gamma"):
        names += ["apply_layernorm_1p", "layernorm_zero_centered_gamma"]
    if expected.get("experimental_attention_variant") == "dsa":
        names += ["dsa_indexer_topk_freq"]
    for name in names:
        if args.get(name):
            raise ShapeMismatchError(
                f"{where} was written with {name} {args[name]}, which gives weights another meaning; allowed: none; "
                "load it with Megatron and save it without"
            )


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(given, int | float) and abs(given) < 2**1000:
        return math.isclose(given, expected, rel_tol=1e-6)
    return bool(given == expected)


def _refuse_unused(checkpoint: Weights, found: Mapping[str, TensorInfo], weight_map: WeightMap) -> None:
    """Refuse a checkpoint with weights that the config does not describe."""
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
    return [in_hand(name, _load(tensors, original.directory, name)) for name in names]
