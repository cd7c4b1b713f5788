"""The samples that a run has kept (:mod:`slime_rollout.shown`), with what the trainer computed for them."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from slime_core.files import naming_damage, read_gzip
from slime_rollout.service import MOST_TOKENS

_NAME = re.compile(r"rollout_(\d+)(?:-rank_\d+)?\.json\.gz")
MOST_BYTES = 4 * 2**20
"""Of files that a report reads; of a longer run, rollouts that are evenly spread."""
MOST_UNPACKED = 64 * 2**20
"""Of what is in them; then no more are read."""


def read_kept(directory: Path, *, last: int) -> tuple[list[dict[str, Any]], int]:
    """Kept samples of rollouts up to ``last``, each with what the trainer computed for it; and of how many there are.

    A file that is torn is left out.
    """
    parts = _rollouts(directory, last)
    stride = -(-sum(file.stat().st_size for files in parts for file in files) // MOST_BYTES) or 1
    samples: list[dict[str, Any]] = []
    read = unpacked = 0
    for files in parts[::stride]:
        if unpacked < MOST_UNPACKED:
            found = [_read(Path(file.path)) for file in files]
            with naming_damage(files[0].path, "remove it, and the others of its rollout"):
                samples += _merged([value for value, _ in found])
            unpacked += sum(size for _, size in found)
            read += 1
    return samples, round(len(samples) * len(parts) / max(read, 1))


def _rollouts(directory: Path, last: int) -> list[list[os.DirEntry[str]]]:
    """The files of each rollout, in order: its own first, then those of the trainer's ranks."""
    found: dict[int, list[os.DirEntry[str]]] = {}
    if directory.is_dir():
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name.replace("-", "~")):
            if (match := _NAME.fullmatch(entry.name)) is not None and int(match[1]) <= last:
                found.setdefault(int(match[1]), []).append(entry)
    return [files for _, files in sorted(found.items()) if "-" not in files[0].name]


def _merged(found: list[Any]) -> Iterator[dict[str, Any]]:
    kept, *ranks = found
    computed = {index: columns for rank in ranks for index, columns in rank.items()}
    for sample in kept:
        sample["rollout"] += 1  # steps are counted from 1 where people read them
        columns = computed.get(str(sample["index"]), {}) if sample["dropped"] is None else {}
        for name in ("train_log_probs", "advantages"):
            values, half = columns.get(name), MOST_TOKENS // 2
            sample[name] = values if values is None or sample["cut"] is None else values[:half] + values[-half:]
        yield sample


def _read(path: Path) -> tuple[Any, int]:
    """The content of a file, and its bytes; nothing of one that is torn."""
    try:
        text = read_gzip(path, most=MOST_UNPACKED)
        try:
            return orjson.loads(text), len(text)
        except ValueError:  # NaN, or half of a surrogate pair
            return json.loads(text), len(text)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError):
        return ([] if "-" not in path.name else {}), 0
