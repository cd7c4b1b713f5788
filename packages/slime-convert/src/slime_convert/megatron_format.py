"""Which of Megatron's checkpoint formats a directory holds. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from slime_convert.errors import CheckpointError
from slime_convert.torch_dist.layout import FORMAT, METADATA, RELEASE, TRACKER

LEGACY, TORCH_DIST = "torch", "torch_dist"
"""The formats that are read, by the words of Megatron's ``--ckpt-format``."""


def find_megatron_checkpoint(directory: str | Path) -> tuple[Path, str]:
    """One iteration of a checkpoint, and its format.

    Args:
        directory: A checkpoint (its tracker names the iteration), or one iteration of it.

    Returns:
        The iteration's directory, and :data:`LEGACY` or :data:`TORCH_DIST`.

    Raises:
        CheckpointError: It is no checkpoint, or of another format.
    """
    path = Path(directory)
    advice = f"give a checkpoint ({TRACKER} with release/ or iter_*/) or one iteration of it"
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}; {advice}")
    if found := _format(path):
        return path, found
    try:
        tracked = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(
            f"{path} is no Megatron checkpoint: it has no mp_rank_* directory, no {METADATA} and no {TRACKER}; {advice}"
        ) from None
    if tracked != RELEASE and not tracked.isdigit():
        raise CheckpointError(f"{path / TRACKER} holds {tracked!r}; it must be {RELEASE!r} or a number; {advice}")
    iteration = path / (tracked if tracked == RELEASE else f"iter_{int(tracked):07d}")
    if not (found := _format(iteration)):
        raise CheckpointError(
            f"{path / TRACKER} names {iteration.name}, but that has no mp_rank_* directory and no {METADATA}; {advice}"
        )
    return iteration, found


def _format(iteration: Path) -> str | None:
    if any(iteration.glob("mp_rank_*/")):
        return LEGACY
    try:
        backend = json.loads((iteration / FORMAT).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        return TORCH_DIST if (iteration / METADATA).is_file() else None
    if backend != TORCH_DIST:
        raise CheckpointError(
            f"{iteration} has format {backend!r}; allowed: {LEGACY!r} and {TORCH_DIST!r}; save it with torch_dist"
        )
    return TORCH_DIST if (iteration / METADATA).is_file() else None
