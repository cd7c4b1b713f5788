"""Every format, and which of them a path holds: the one place that tells them apart."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from slime_convert.errors import CheckpointError, ConvertError
from slime_convert.files import read_file
from slime_convert.files.partial import refuse_unfinished
from slime_convert.formats.checkpoint import Format, Weights
from slime_convert.formats.gguf import GgufWeights, find_gguf
from slime_convert.formats.hf import HfWeights
from slime_convert.formats.legacy import LegacyWeights
from slime_convert.formats.safetensors import INDEX
from slime_convert.formats.torch_dist import TorchDistWeights
from slime_convert.formats.torch_dist_names import FORMAT, METADATA, RELEASE, TRACKER

LEGACY, TORCH_DIST, HF, GGUF = "torch", "torch_dist", "hf", "gguf"
"""Names of formats; Megatron's are those of its ``--ckpt-format``."""

_TRACKED = re.compile(rf"{RELEASE}|[0-9]{{1,18}}")
_MEGATRON = f"{TRACKER} with release/ or iter_*/"


class Checkpoint(NamedTuple):
    """A checkpoint's format, and its directory, such as one iteration of a Megatron checkpoint, or its GGUF file."""

    form: Format
    path: Path


def detect(path: str | Path, allowed: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint at a path.

    Args:
        path: As a user gives it: a directory (of a Megatron checkpoint, one iteration too), or a GGUF file.
        allowed: Names of the formats that can be used; every one by default.

    Raises:
        CheckpointError: ``path`` is missing, or holds a broken checkpoint or one of another format.
        GgufError: There are several GGUF files.
        UnfinishedError: A conversion is running there, or was interrupted.
    """
    refuse_unfinished(path)
    place = Path(path)
    usable = [form for form in FORMATS if allowed is None or form.name in allowed]
    advice = "; ".join(f"{form.name} ({form.looks_like})" for form in usable)
    if not place.exists():
        raise CheckpointError(f"there is no {place}; give a checkpoint: {advice}")
    for form in FORMATS:
        found = form.find(place)
        if found is None:
            continue
        if form not in usable:
            more = f"slime-convert {form.command} converts it"
            raise CheckpointError(f"{place} is a checkpoint of format {form.name}; allowed: {advice}; {more}")
        return Checkpoint(form, found)
    for form in usable if place.is_file() else ():
        if form.name != "gguf" and form.find(place.parent) is not None:  # a GGUF file is given itself
            raise CheckpointError(f"{place} is a file of a checkpoint of format {form.name}; give its directory")
    raise CheckpointError(f"{place} is not a checkpoint of a known format; give one of these: {advice}")


def open_checkpoint(path: str | Path) -> Weights:
    """The weights of the checkpoint at a path, of any format; errors as of :func:`detect`."""
    form, found = detect(path)
    return form.open(found)


def _iteration(path: Path) -> Path | None:
    """The iteration of a Megatron checkpoint: the path itself, or what the tracker names."""
    if _is_iteration(path):
        return path
    tracker = path / TRACKER
    if not tracker.exists():
        return None
    tracked = read_file(path, TRACKER, CheckpointError).decode(errors="replace").strip()
    if not _TRACKED.fullmatch(tracked):
        must = f"it must be {RELEASE!r} or a number; give one iteration of the checkpoint"
        raise CheckpointError(f"{tracker} holds {tracked!r:.40}; {must}")
    iteration = path / (tracked if tracked == RELEASE else f"iter_{int(tracked):07d}")
    if os.path.lexists(iteration) and not Path(os.path.realpath(iteration)).is_relative_to(os.path.realpath(path)):
        raise CheckpointError(f"{iteration} leads outside of {path}; copy it there, or give the iteration itself")
    if not _is_iteration(iteration):
        what = f"{iteration.name}, but that has no mp_rank_* directory and no {METADATA}"
        raise CheckpointError(f"{tracker} names {what}; give another iteration of the checkpoint")
    return iteration


def _is_iteration(path: Path) -> bool:
    return _is_legacy(path) or (path / METADATA).is_file() or _backend(path) not in (None, TORCH_DIST)


def _is_legacy(iteration: Path) -> bool:
    return iteration.is_dir() and any(iteration.glob("mp_rank_*/"))


def _backend(iteration: Path) -> str | None:
    """The format that megatron-core recorded, such as ``torch_dist`` or ``zarr``; ``None`` if that is unknown."""
    try:
        return str(json.loads(read_file(iteration, FORMAT, CheckpointError))["sharded_backend"])
    except (ConvertError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _find_legacy(path: Path) -> Path | None:
    iteration = _iteration(path)
    return iteration if iteration is not None and _is_legacy(iteration) else None


def _find_torch_dist(path: Path) -> Path | None:
    iteration = _iteration(path)
    if iteration is None or _is_legacy(iteration):
        return None
    backend = _backend(iteration)
    if backend is None:
        raise CheckpointError(f"{iteration / FORMAT} is missing or names no format; use a complete checkpoint")
    if backend != TORCH_DIST:
        allowed = f"{LEGACY!r} and {TORCH_DIST!r}"
        raise CheckpointError(f"{iteration} has format {backend!r}; allowed: {allowed}; save it with torch_dist")
    return iteration


def _find_hf(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    if (path / INDEX).exists() or any(path.glob("*.safetensors")):
        return path
    # A config may lie next to a GGUF file too.
    return path if (path / "config.json").exists() and not any(path.glob("*.gguf")) else None


FORMATS: tuple[Format, ...] = (
    Format(LEGACY, f"{_MEGATRON}, or mp_rank_*/", "megatron-to-hf", _find_legacy, LegacyWeights),
    Format(TORCH_DIST, f"{_MEGATRON}, or {METADATA}", "torch-dist-to-hf", _find_torch_dist, TorchDistWeights),
    Format(HF, "*.safetensors with config.json", "hf-to-torch-dist", _find_hf, HfWeights),
    Format(GGUF, "a .gguf file, or a directory with exactly one", "gguf-to-hf", find_gguf, GgufWeights),
)
"""Every format; the first that finds something is used."""
