"""The samples that a run has kept (:mod:`slime_launch.shown`), with what the trainer computed for them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_launch.shown import MOST_TOKENS

MOST_BYTES = 4 * 2**20
"""Of files that a report reads; of a longer run, rollouts that are evenly spread."""


def read_kept(directory: Path, *, last: int) -> tuple[list[dict[str, Any]], int]:
    """Kept samples of rollouts up to ``last``, each with what the trainer computed for it; and of how many there are.

    A file that is torn is left out.
    """
    files = sorted(
        path for path in directory.glob("rollout_*.json.gz") if "-" not in path.name and _number(path) <= last
    )
    sizes = {path: sum(part.stat().st_size for part in _parts(path)) for path in files}
    stride = -(-sum(sizes.values()) // MOST_BYTES) or 1
    samples = [sample for path in files[::stride] for sample in _merged(path)]
    return samples, round(len(samples) * len(files) / max(len(files[::stride]), 1))


def _number(path: Path) -> int:
    return int(path.name.removeprefix("rollout_").split(".")[0])


def _parts(path: Path) -> list[Path]:
    """The file of a rollout, and those of the trainer's ranks."""
    stem = path.name.removesuffix(".json.gz")
    return [path, *sorted(path.parent.glob(f"{stem}-rank_*.json.gz"))]


def _merged(path: Path) -> Iterator[dict[str, Any]]:
    kept, *ranks = [_read(part) for part in _parts(path)]
    computed = {index: columns for rank in ranks for index, columns in rank.items()}
    for sample in kept:
        columns = computed.get(str(sample["index"]), {}) if sample["dropped"] is None else {}
        for name in ("train_log_probs", "advantages"):
            values, half = columns.get(name), MOST_TOKENS // 2
            sample[name] = values if values is None or sample["cut"] is None else values[:half] + values[-half:]
        yield sample


def _read(path: Path) -> Any:
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return [] if "-" not in path.name else {}
