"""Checks that several conversions make: of the config, of weights' types, of weights that no table has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_convert.errors import WeightError
from slime_convert.files.partial import refuse_unfinished
from slime_convert.files.tensors import LazyTensor, TensorInfo
from slime_convert.formats import hf
from slime_convert.mapping import WeightMap, hf_copies
from slime_convert.shape import ModelShape, check_flags

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def checked_shape(directory: Path, flags: Mapping[str, Any] | None) -> tuple[ModelShape, dict[str, Any]]:
    """A directory's config, and the shape that it describes; likely mistakes are reported before all else is read."""
    refuse_unfinished(directory)
    shape, config = ModelShape.from_hf_config(directory), hf.read_config(directory)
    given = dict(flags or {})
    if given.get("mtp_num_layers") == 0:
        shape, given["mtp_num_layers"] = replace(shape, mtp_num_layers=0), None
    check_flags(shape, given)
    return shape, config


def checked_type(name: str, tensor: TensorInfo | LazyTensor, where: Path) -> None:
    """Refuse a weight whose type is not one of plain floating-point numbers (:class:`WeightError`)."""
    if tensor.dtype not in _FLOATS:
        raise WeightError(
            f"{name} of {where} has type {tensor.dtype}; allowed: {', '.join(_FLOATS)}; convert an unquantized model"
        )


def checked_weight(tensors: Mapping[str, LazyTensor], where: Path, name: str) -> LazyTensor:
    """A model's weight, not read yet; a :class:`WeightError` if it is missing, or not of floating-point numbers."""
    if name not in tensors:
        raise WeightError(f"{where} has no weight {name}, which its config.json asks for; fetch the model again")
    checked_type(name, tensors[name], where)
    return tensors[name]


def unknown_weights(tensors: Iterable[str], weight_map: WeightMap) -> set[str]:
    """Names of a Hugging Face model's weights that no rule carries."""
    known = {*weight_map.hf_names(), *hf_copies(weight_map.shape), hf.LM_HEAD}
    return {name for name in tensors if name not in known and not name.endswith(hf.FREQUENCIES)}
