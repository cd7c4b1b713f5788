"""The checkpoint formats, and which of them a path holds: the one place that tells them apart.

No torch here: a format's weights are opened when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from slime_convert.checkpoint import Contents, Format, Weights
from slime_convert.errors import CheckpointError
from slime_convert.gguf_file import find_gguf
from slime_convert.safetensors_files import INDEX
from slime_convert.torch_dist.layout import FORMAT, METADATA, RELEASE, TRACKER
from slime_convert.unfinished import refuse_unfinished

LEGACY, TORCH_DIST, HF, GGUF = "torch", "torch_dist", "hf", "gguf"
"""Names of formats; Megatron's are those of its ``--ckpt-format``."""

_MAX_DIGITS = 18  # of an iteration

_MEGATRON = f"{TRACKER} with release/ or iter_*/"


class Checkpoint(NamedTuple):
    """What a path holds.

    Attributes:
        form: Its format.
        path: Where its files are: a directory, such as one iteration of a Megatron checkpoint, or a GGUF file.
    """

    form: Format
    path: Path


def detect(path: str | Path, allowed: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint at a path.

    Args:
        path: As a user gives it: a directory (of a Megatron checkpoint, one iteration too), or a GGUF file.
        allowed: Names of the formats that can be used; every one by default.

    Raises:
        CheckpointError: There is nothing at ``path``, or nothing that is known, or a broken checkpoint, or one of a
            format that is not allowed.
        GgufError: There are several GGUF files.
        UnfinishedError: A conversion is under way there, or was interrupted.
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
            raise CheckpointError(
                f"{place} is a checkpoint of format {form.name}; allowed: {advice}; "
                f"slime-convert {form.command} converts it"
            )
        return Checkpoint(form, found)
    raise CheckpointError(f"{place} is no checkpoint of a known format; give one of these: {advice}")


def _iteration(path: Path) -> Path | None:
    """The iteration of a Megatron checkpoint: the path itself, or what the tracker names.

    Raises:
        CheckpointError: The tracker names none, or one that is not there.
    """
    if _is_iteration(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    try:
        tracked = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {tracker} ({error}); give one iteration of the checkpoint") from error
    if tracked != RELEASE and not (tracked.isascii() and tracked.isdigit() and len(tracked) <= _MAX_DIGITS):
        raise CheckpointError(
            f"{tracker} holds {tracked!r:.40}; it must be {RELEASE!r} or a number; give one iteration of the checkpoint"
        )
    iteration = path / (tracked if tracked == RELEASE else f"iter_{int(tracked):07d}")
    if not _is_iteration(iteration):
        raise CheckpointError(
            f"{tracker} names {iteration.name}, but that has no mp_rank_* directory and no {METADATA}; "
            "give another iteration of the checkpoint"
        )
    return iteration


def _is_iteration(path: Path) -> bool:
    return _is_legacy(path) or (path / METADATA).is_file() or _backend(path) not in (None, TORCH_DIST)


def _is_legacy(iteration: Path) -> bool:
    return any(iteration.glob("mp_rank_*/"))


def _backend(iteration: Path) -> str | None:
    """The format that megatron-core recorded, such as ``torch_dist`` or ``zarr``; ``None`` if it did not."""
    try:
        return str(json.loads((iteration / FORMAT).read_text(encoding="utf-8"))["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _find_legacy(path: Path) -> Path | None:
    iteration = _iteration(path)
    return iteration if iteration is not None and _is_legacy(iteration) else None


def _inspect_legacy(iteration: Path) -> Contents:
    from slime_convert.contents import legacy_contents

    return legacy_contents(iteration)


@contextmanager
def _open_legacy(iteration: Path) -> Iterator[Weights]:
    from slime_convert.verify.legacy_weights import LegacyWeights

    yield LegacyWeights(iteration)


def _find_torch_dist(path: Path) -> Path | None:
    iteration = _iteration(path)
    if iteration is None or _is_legacy(iteration):
        return None
    backend = _backend(iteration)
    if backend is None:
        raise CheckpointError(
            f"{iteration / FORMAT} names no format, or is missing; use a complete torch_dist checkpoint"
        )
    if backend != TORCH_DIST:
        raise CheckpointError(
            f"{iteration} has format {backend!r}; allowed: {LEGACY!r} and {TORCH_DIST!r}; save it with torch_dist"
        )
    return iteration


def _inspect_torch_dist(iteration: Path) -> Contents:
    from slime_convert.contents import torch_dist_contents

    return torch_dist_contents(iteration)


@contextmanager
def _open_torch_dist(iteration: Path) -> Iterator[Weights]:
    from slime_convert.verify.torch_dist_weights import TorchDistWeights

    yield TorchDistWeights(iteration)


def _find_hf(path: Path) -> Path | None:
    if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        return path
    # A config may lie beside a GGUF file too.
    return path if (path / "config.json").is_file() and not any(path.glob("*.gguf")) else None


def _inspect_hf(path: Path) -> Contents:
    from slime_convert.contents import hf_contents

    return hf_contents(path)


@contextmanager
def _open_hf(path: Path) -> Iterator[Weights]:
    from slime_convert.verify.hf_weights import HfWeights

    with HfWeights(path) as weights:
        yield weights


def _inspect_gguf(file: Path) -> Contents:
    from slime_convert.contents import gguf_contents

    return gguf_contents(file)


@contextmanager
def _open_gguf(file: Path) -> Iterator[Weights]:
    from slime_convert.verify.gguf_weights import GgufWeights

    yield GgufWeights(file)


FORMATS: tuple[Format, ...] = (
    Format(
        LEGACY,
        f"{_MEGATRON}, or mp_rank_*/",
        "megatron-to-hf",
        _find_legacy,
        _inspect_legacy,
        _open_legacy,
    ),
    Format(
        TORCH_DIST,
        f"{_MEGATRON}, or {METADATA}",
        "torch-dist-to-hf",
        _find_torch_dist,
        _inspect_torch_dist,
        _open_torch_dist,
    ),
    Format(HF, "*.safetensors with config.json", "hf-to-torch-dist", _find_hf, _inspect_hf, _open_hf),
    Format(GGUF, "a .gguf file, or a directory with exactly one", "gguf-to-hf", find_gguf, _inspect_gguf, _open_gguf),
)
"""Every format; the first that finds something counts."""
