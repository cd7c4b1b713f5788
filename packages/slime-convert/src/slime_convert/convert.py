"""Whole conversions between Hugging Face directories and ``torch_dist`` checkpoints, without GPU or Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_convert.errors import CheckpointError, ShapeMismatchError, WeightError
from slime_convert.hf import HfReader, copy_model_files
from slime_convert.mapping import WeightMap, WeightTranslation
from slime_convert.mapping.families import TABLES
from slime_convert.output import new_directory
from slime_convert.progress import OnProgress, no_progress
from slime_convert.quantize.reader import open_weights
from slime_convert.shape import ModelShape, check_flags
from slime_convert.shard_file import TensorSpec
from slime_convert.shards import DEFAULT_SHARD_BYTES, Step, write_shards
from slime_convert.torch_dist import TorchDistReader, WeightSource, write_release
from slime_convert.torch_dist.layout import TRACKER, Place, places
from slime_convert.unfinished import Conversion, refuse_unfinished


class MegatronReader(Protocol):
    """The weights of a Megatron checkpoint of any format, by whole-model names of megatron-core's local layers."""

    directory: Path

    @property
    def weight_keys(self) -> set[str]:
        """Keys of the model's tensors, as they stand on disk."""

    def args(self) -> Mapping[str, Any]:
        """The arguments that the checkpoint records; empty if it records none."""

    def find(self, name: str) -> Place:
        """Where a weight lies; a :class:`CheckpointError` if there is none."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of one weight."""

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight."""

    def load(self, name: str) -> Tensor:
        """One whole weight."""


def hf_to_torch_dist(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    flags: Mapping[str, Any] | None = None,
    bridge: str | None = None,
    make_vocab_size_divisible_by: int = 128,
    part_bytes: int | None = None,
    force: bool = False,
    on_progress: OnProgress = no_progress,
) -> None:
    """Convert a Hugging Face model into a ``torch_dist`` checkpoint that Megatron loads at any parallelism.

    Weights that are quantized (block-scaled FP8 or packed INT4) become ``bfloat16``.

    Args:
        hf_checkpoint: Directory with ``config.json`` and ``*.safetensors``.
        save: Directory to create.
        flags: Shape flags to be checked against the config, by ``dest``.
        bridge: ``mbridge`` to take names and layouts from it instead of this package's tables.
        make_vocab_size_divisible_by: The embedding is padded with zero rows to a multiple of this.
        part_bytes: Largest ``.distcp`` file, in bytes; see :func:`slime_convert.torch_dist.write_release`.
        force: Replace an earlier checkpoint at ``save``.
        on_progress: Called with what an earlier run left, then after each weight.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``save`` then.
    """
    origin = Path(hf_checkpoint)
    weight_map = checked_weights(origin, flags, bridge, make_vocab_size_divisible_by)
    with open_weights(origin) as reader:
        _refuse_unknown(reader, weight_map)
        _refuse_missing_modules(reader, weight_map)
        _refuse_other_copies(reader, weight_map)
        sources = [_source(name, weight_map, reader) for name in weight_map.megatron_names()]
        options = {
            "names": type(weight_map).__name__,
            "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
            "part_bytes": part_bytes,
        }
        conversion = Conversion("hf-to-torch-dist", (origin,), options)
        with new_directory(save, conversion, force=force, marker=TRACKER) as unfinished:
            args = dict(weight_map.megatron_args()) | {
                "padded_vocab_size": weight_map.padded_vocab_size,
                "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
                "params_dtype": str(sources[0].dtype).removeprefix("torch."),
            }
            write_release(
                unfinished.output,
                sources,
                args,
                on_progress,
                stack_layers=weight_map.equal_layers,
                part_bytes=part_bytes,
                state=unfinished.state,
            )


def torch_dist_to_hf(
    input_dir: str | Path,
    output_dir: str | Path,
    origin_hf_dir: str | Path,
    *,
    flags: Mapping[str, Any] | None = None,
    bridge: str | None = None,
    add_missing_from_origin_hf: bool = False,
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> list[str]:
    """Convert a ``torch_dist`` checkpoint, converted or written by a trainer, into a Hugging Face directory.

    Args:
        input_dir: The checkpoint, or one iteration of it. Optimizer state is skipped.
        output_dir: Directory to create.
        origin_hf_dir: The Hugging Face model that training began with: gives config, tokenizer and chat template. If it
            is quantized, the written config is that of an unquantized model.
        flags: Shape flags to be checked against the config, by ``dest``.
        bridge: ``mbridge`` to take names and layouts from it instead of this package's tables.
        add_missing_from_origin_hf: Copy weights that the checkpoint lacks from ``origin_hf_dir``; quantized ones become
            ``bfloat16``.
        force: Replace an earlier model at ``output_dir``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight.

    Returns:
        Hugging Face names of the weights that were copied from ``origin_hf_dir``.

    Raises:
        ConvertError: An input or output is not as it must be; nothing is changed at ``output_dir`` then.
    """
    weight_map = checked_weights(origin_hf_dir, flags, bridge)
    return write_hf(
        TorchDistReader(input_dir),
        weight_map,
        output_dir,
        origin=Path(origin_hf_dir),
        add_missing=add_missing_from_origin_hf,
        force=force,
        max_shard_bytes=max_shard_bytes,
        on_progress=on_progress,
    )


def checked_weights(
    hf_directory: str | Path,
    flags: Mapping[str, Any] | None,
    bridge: str | None = None,
    make_vocab_size_divisible_by: int = 1,
) -> WeightTranslation:
    """The weights of the model that a Hugging Face directory describes.

    Args:
        hf_directory: Holds ``config.json``.
        flags: Shape flags to be checked against it, by ``dest``.
        bridge: ``mbridge`` to take names and layouts from it instead of this package's tables.
        make_vocab_size_divisible_by: The embedding is padded to a multiple of this.

    Raises:
        BridgeError: The bridge is unknown or not installed.
        HfConfigError: There is no readable ``config.json``.
        UnsupportedModelError: The model is not supported.
        ShapeMismatchError: Shape flags contradict its config.
    """
    refuse_unfinished(hf_directory)
    if bridge is not None:
        from slime_convert.bridge import bridged_weights

        return bridged_weights(
            bridge, hf_directory, flags=flags, make_vocab_size_divisible_by=make_vocab_size_divisible_by
        )
    shape = ModelShape.from_hf_config(Path(hf_directory))
    check_flags(shape, flags or {})
    return WeightMap(shape, shape.padded_vocab_size(1, make_vocab_size_divisible_by))


def write_hf(
    reader: MegatronReader,
    weight_map: WeightTranslation,
    output_dir: str | Path,
    *,
    origin: Path,
    add_missing: bool,
    force: bool,
    max_shard_bytes: int,
    on_progress: OnProgress,
) -> list[str]:
    """Write a Megatron checkpoint's weights as a Hugging Face directory.

    Args:
        reader: The checkpoint.
        weight_map: The model that it must hold.
        output_dir: Directory to create.
        origin: The Hugging Face model that training began with.
        add_missing: Copy weights that the checkpoint lacks from ``origin``.
        force: Replace an earlier model at ``output_dir``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight of the checkpoint.

    Returns:
        Names of the weights that were copied from ``origin``.
    """
    check_args(weight_map.megatron_args(), reader.args(), reader.directory)
    names = list(weight_map.megatron_names())
    if add_missing:
        names = _present(reader, names)
    _refuse_unused(reader, weight_map, names)
    dtype = reader.dtype(names[0])
    steps = [_hf_step(name, weight_map, reader) for name in names]
    copied: list[str] = []
    with ExitStack() as stack:
        if add_missing:
            original = stack.enter_context(open_weights(origin))
            copied = _not_in_checkpoint(original, weight_map, names)
            steps = [_copy_step(name, original) for name in copied] + steps
        options = {
            "names": type(weight_map).__name__,
            "add_missing": add_missing,
            "max_shard_bytes": max_shard_bytes,
        }
        conversion = Conversion("megatron-to-hf", (reader.directory, origin), options)
        unfinished = stack.enter_context(new_directory(output_dir, conversion, force=force, marker="config.json"))
        write_shards(unfinished.output, steps, max_shard_bytes, on_progress)
        copy_model_files(origin, unfinished.output, dtype)
    return copied


def check_args(expected: Mapping[str, Any], args: Mapping[str, Any], where: Path) -> None:
    """Compare the arguments that a checkpoint records with a model's; arguments that are not recorded pass.

    Args:
        expected: The model's, as :meth:`slime_convert.ModelShape.to_megatron_args` gives them.
        args: As recorded.
        where: The checkpoint, for the message.

    Raises:
        ShapeMismatchError: One message with every contradiction.
    """
    # Megatron ignores the group count without grouped-query attention, and pads or shortens these two at will.
    loose = {"max_position_embeddings", "vocab_size"}
    # Kimi-K2's makers tell users to call it deepseek_v3 where kimi_k2 is not known: its weights are the same.
    table = TABLES.get(str(expected.get("hf_model_type")))
    if table is not None and TABLES.get(str(args.get("hf_model_type"))) is table:
        loose.add("hf_model_type")
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
    wrong = [
        f"{name} {args[name]} (config: {value})"
        for name, value in expected.items()
        if name not in loose and args.get(name) is not None and not _same(args[name], value)
    ]
    _refuse_other_meaning(args, where)
    if wrong:
        raise ShapeMismatchError(
            f"{where} was written by another model than the given Hugging Face config describes: {'; '.join(wrong)}; "
            "give the Hugging Face directory that training began with"
        )


def _refuse_other_meaning(args: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint whose weights have the usual shapes, but stand for something else.

    Raises:
        ShapeMismatchError: It has norms less one, or may have the rows of gate and up projections in blocks: Megatron
            wrote such rows as the training had them, and later in the usual order, and records no difference.
    """
    for name in ("apply_layernorm_1p", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        if args.get(name):
            raise ShapeMismatchError(
                f"{where} was written with {name} {args[name]}, which gives weights another meaning; allowed: none; "
                "load it with Megatron and save it without"
            )


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(given, int | float):
        return math.isclose(given, expected, rel_tol=1e-6)
    return bool(given == expected)


def _source(name: str, weight_map: WeightTranslation, reader: HfReader) -> WeightSource:
    dtypes = {reader.dtype(part) for part in weight_map.hf_parts(name)}
    if len(dtypes) != 1:
        raise WeightError(
            f"{' and '.join(weight_map.hf_parts(name))} have types {sorted(map(str, dtypes))} but make up one "
            "Megatron weight; save the model with one type"
        )

    def load() -> Tensor:
        return weight_map.from_hf(name, reader.load)

    return WeightSource(
        name,
        weight_map.megatron_shape(name),
        dtypes.pop(),
        load,
        stored_as=tuple(weight_map.stored_as(name)),
        expert=weight_map.expert(name),
    )


def _refuse_unknown(reader: HfReader, weight_map: WeightTranslation) -> None:
    """Refuse weights that no rule carries: dropping them silently would change the model."""
    unknown = _unknown(reader, weight_map)
    if unknown:
        raise WeightError(
            f"{reader.directory} has {len(unknown)} weights that a {weight_map.family} model does not have, "
            f"such as {min(unknown)}; convert a model whose config.json describes all its weights"
        )


def _refuse_missing_modules(reader: HfReader, weight_map: WeightTranslation) -> None:
    """Tell it where a config has prediction modules and the files have none, as in what transformers saves."""
    args = weight_map.megatron_args()
    modules, first = args.get("mtp_num_layers"), f"model.layers.{args['num_layers']}."
    listed = any(name.startswith(first) for name in weight_map.hf_names())
    if modules and listed and not any(name.startswith(first) for name in reader.names):
        raise WeightError(
            f"{reader.directory} has no prediction module ({first}*), but num_nextn_predict_layers of its config is "
            f"{modules}; set it to 0 to convert the model without, or fetch the model's original weights"
        )


def _refuse_other_copies(reader: HfReader, weight_map: WeightTranslation) -> None:
    """Refuse a prediction module with an embedding or an output layer of its own: Megatron's shares the model's."""
    for copy, original in weight_map.hf_copies().items():
        if copy in reader.names and not torch.equal(reader.load(copy), reader.load(original)):
            raise WeightError(
                f"{copy} of {reader.directory} differs from {original}, but Megatron's prediction modules share it; "
                "convert a model in which the two are equal"
            )


def _unknown(reader: HfReader, weight_map: WeightTranslation) -> set[str]:
    """Weights of a Hugging Face model that no rule carries."""
    return {
        name
        for name in reader.names - set(weight_map.hf_names())
        # A tied model may store its output layer a second time; old Llama files store the rotary frequencies.
        if name != "lm_head.weight" and not name.endswith(".rotary_emb.inv_freq")
    }


def _present(reader: MegatronReader, names: Iterable[str]) -> list[str]:
    """Those of the Megatron weights that a checkpoint has."""
    present = []
    for name in names:
        with suppress(CheckpointError):
            reader.find(name)
            present.append(name)
    if not present:
        raise CheckpointError(
            f"{reader.directory} has no weight of the model that the given Hugging Face config describes; "
            "give the Hugging Face directory that training began with"
        )
    return present


def _not_in_checkpoint(origin: HfReader, weight_map: WeightTranslation, present: Iterable[str]) -> list[str]:
    """Weights of the original model that come from no Megatron weight of a checkpoint, in the model's order."""
    carried = {part for name in present for part in weight_map.hf_parts(name)}
    # A prediction module's embedding is the model's, and comes with that.
    carried |= {copy for copy, original in weight_map.hf_copies().items() if original in carried}
    missing = [name for name in weight_map.hf_names() if name not in carried] + sorted(_unknown(origin, weight_map))
    for name in missing:
        origin.dtype(name)  # refuses what is absent there, and what is quantized though its config does not say so
    return missing


def _refuse_unused(reader: MegatronReader, weight_map: WeightTranslation, names: Iterable[str]) -> None:
    """Refuse a checkpoint with weights that the config does not describe."""
    names = list(names)
    used = {key for name in names for key in reader.find(name).keys}
    used |= {key for name in names for place in places(name) for key in place.keys}  # a norm may be stored twice
    unused = reader.weight_keys - used - {"output_layer.weight"}
    if unused:
        raise CheckpointError(
            f"{reader.directory} has {len(unused)} weights that the given Hugging Face config does not describe, "
            f"such as {min(unused)}; give the Hugging Face directory that training began with"
        )


def _hf_step(name: str, weight_map: WeightTranslation, reader: MegatronReader) -> Step:
    """The Hugging Face weights inside one Megatron weight."""
    # A tensor without elements is cut as the weight will be.
    outline = torch.empty(reader.shape(name), dtype=reader.dtype(name), device="meta")
    parts = weight_map.to_hf(name, outline)
    return Step(
        tuple(TensorSpec(part, tensor.dtype, tuple(tensor.shape)) for part, tensor in parts),
        lambda: [tensor for _, tensor in weight_map.to_hf(name, reader.load(name))],
    )


def _copy_step(name: str, origin: HfReader) -> Step:
    return Step((origin.spec(name),), lambda: [origin.load(name)])
