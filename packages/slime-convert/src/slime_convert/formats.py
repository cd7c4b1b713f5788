"""The formats that ``inspect`` and ``verify`` read. No torch here: a format's weights are opened when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_convert.checkpoint import Contents, Format, Weights
from slime_convert.errors import CheckpointError
from slime_convert.safetensors_files import INDEX


def _is_torch_dist(path: Path) -> bool:
    from slime_convert.torch_dist.layout import METADATA, TRACKER

    return (path / METADATA).is_file() or (path / TRACKER).is_file()


def _inspect_torch_dist(path: Path) -> Contents:
    from slime_convert.contents import torch_dist_contents

    return torch_dist_contents(path)


@contextmanager
def _open_torch_dist(path: Path) -> Iterator[Weights]:
    from slime_convert.verify.torch_dist_weights import TorchDistWeights

    yield TorchDistWeights(path)


def _is_hf(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", INDEX)) or any(path.glob("*.safetensors"))


def _inspect_hf(path: Path) -> Contents:
    from slime_convert.contents import hf_contents

    return hf_contents(path)


@contextmanager
def _open_hf(path: Path) -> Iterator[Weights]:
    from slime_convert.verify.hf_weights import HfWeights

    with HfWeights(path) as weights:
        yield weights


FORMATS: tuple[Format, ...] = (
    Format(
        "torch_dist",
        "latest_checkpointed_iteration.txt with release/ or iter_*/, or .metadata",
        _is_torch_dist,
        _inspect_torch_dist,
        _open_torch_dist,
    ),
    Format("hf", "*.safetensors with config.json", _is_hf, _inspect_hf, _open_hf),
)
"""Every format, the first that matches counts."""


def detect(path: str | Path) -> Format:
    """The format of a checkpoint.

    Raises:
        CheckpointError: There is nothing at ``path``, or nothing that is known.
    """
    place = Path(path)
    known = "; ".join(f"{form.name} ({form.looks_like})" for form in FORMATS)
    if not place.exists():
        raise CheckpointError(f"there is no {place}; give a checkpoint: {known}")
    for form in FORMATS:
        if form.matches(place):
            return form
    raise CheckpointError(f"{place} is no checkpoint of a known format; give one of these: {known}")
