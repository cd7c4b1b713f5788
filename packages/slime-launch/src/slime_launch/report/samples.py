"""The samples that a run has kept (:mod:`slime_launch.shown`), with what the trainer computed for them."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from slime_launch.shown import MOST_TOKENS

_NAME = re.compile(r"rollout_(\d+)(?:-rank_\d+)?\.json\.gz")
MOST_BYTES = 4 * 2**20
"""Of files that a report reads; of a longer run, rollouts that are evenly spread."""


def read_kept(directory: Path, *, last: int) -> tuple[list[dict[str, Any]], int]:
    """Kept samples of rollouts up to ``last``, each with what the trainer computed for it; and of how many there are.

    A file that is torn is left out.
    """
    parts = _rollouts(directory, last)
    stride = -(-sum(file.stat().st_size for files in parts for file in files) // MOST_BYTES) or 1
    samples = [sample for files in parts[::stride] for sample in _merged([Path(file.path) for file in files])]
    return samples, round(len(samples) * len(parts) / max(len(parts[::stride]), 1))


def _rollouts(directory: Path, last: int) -> list[list[os.DirEntry[str]]]:
    """The files of each rollout, in order: its own first, then those of the trainer's ranks."""
    found: dict[int, list[os.DirEntry[str]]] = {}
    if directory.is_dir():
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name.replace("-", "~")):
            if (match := _NAME.fullmatch(entry.name)) is not None and int(match[1]) <= last:
                found.setdefault(int(match[1]), []).append(entry)
    return [files for _, files in sorted(found.items()) if "-" not in files[0].name]


def _merged(files: list[Path]) -> Iterator[dict[str, Any]]:
    kept, *ranks = map(_read, files)
    computed = {index: columns for rank in ranks for index, columns in rank.items()}
    for sample in kept:
        sample["rollout"] += 1  # steps are counted from 1 where people read them
        columns = computed.get(str(sample["index"]), {}) if sample["dropped"] is None else {}
        for name in ("train_log_probs", "advantages"):
            values, half = columns.get(name), MOST_TOKENS // 2
            sample[name] = values if values is None or sample["cut"] is None else values[:half] + values[-half:]
        yield sample


def _read(path: Path) -> Any:
    try:
        text = gzip.decompress(path.read_bytes())
        try:
            return orjson.loads(text)
        except ValueError:  # NaN, or half of a surrogate pair
            return json.loads(text)
    except (OSError, EOFError, ValueError, zlib.error):
        return [] if "-" not in path.name else {}
