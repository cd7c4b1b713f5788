"""Any Megatron checkpoint, ``torch_dist`` or legacy ``torch``, into a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_convert.convert import MegatronReader, checked_weights, write_hf
from slime_convert.formats import LEGACY, TORCH_DIST, detect
from slime_convert.legacy import LegacyReader
from slime_convert.mapping import WeightTranslation
from slime_convert.progress import OnProgress, no_progress
from slime_convert.shards import DEFAULT_SHARD_BYTES
from slime_convert.torch_dist import TorchDistReader


def megatron_to_hf(
    load: str | Path,
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
    """Convert a Megatron checkpoint of either format into a Hugging Face directory; optimizer state is skipped.

    Args:
        load: The checkpoint, or one iteration of it.
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
        open_megatron(load, weight_map),
        weight_map,
        output_dir,
        origin=Path(origin_hf_dir),
        add_missing=add_missing_from_origin_hf,
        force=force,
        max_shard_bytes=max_shard_bytes,
        on_progress=on_progress,
    )


def open_megatron(directory: str | Path, weight_map: WeightTranslation) -> MegatronReader:
    """A reader of a Megatron checkpoint of either format.

    Args:
        directory: The checkpoint, or one iteration of it.
        weight_map: The model that it holds.

    Raises:
        CheckpointError: It is no readable checkpoint.
    """
    form, iteration = detect(directory, (LEGACY, TORCH_DIST))
    return LegacyReader(iteration, weight_map.merge_tp) if form.name == LEGACY else TorchDistReader(iteration)
