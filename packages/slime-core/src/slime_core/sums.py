"""Checksums of a rollout, small enough to be written down in every step: where two runs part, they differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.types import TrainShard
from slime_core.types.arrays import Columns, Ragged

_ABSENT = 0xFFFFFFFF


def sample_sums(columns: Columns) -> dict[str, NDArray[np.uint32]]:
    """CRC-32 of each field of each sample [S], by the field's name; an absent row differs from an empty one."""
    found = {}
    for name, column in columns.items():
        rows: Sequence[Any] = column.rows if isinstance(column, Ragged) else list(column)
        found[name] = np.array([_ABSENT if row is None else _sum(row) for row in rows], np.uint32)
    return found


def shard_sum(shard: TrainShard) -> int:
    """CRC-32 of the numbers of a rank's samples, and of their order in micro-batches."""
    order = [list(step.micro_batches) for step in shard.steps]
    return zlib.crc32(repr(order).encode(), _sum(np.asarray(shard.columns["index"])))


def _sum(values: Any) -> int:
    """Of the numbers as they are, not of the type that holds them: a column has that of its widest number."""
    given = np.asarray(values)
    wide = {"f": "<f8", "i": "<i8", "u": "<i8"}.get(given.dtype.kind) if given.dtype.itemsize > 1 else None
    return zlib.crc32(np.ascontiguousarray(given, wide).tobytes())
