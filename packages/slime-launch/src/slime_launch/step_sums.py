"""``sums.jsonl`` of a run: checksums of every rollout and of the weights after it, for `slime-launch diff`."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slime_core.files import MOST_BYTES, open_file, open_to_append, write_whole
from slime_core.types import TrainReport

if TYPE_CHECKING:
    from slime_rollout.service import ReadyRollout

SUMS_FILE = "sums.jsonl"
_NO_WEIGHTS = np.zeros((0, 0), np.uint32)


@dataclasses.dataclass(frozen=True)
class StepSums:
    """Checksums of one rollout, decoded as they are asked for: most rollouts of two runs are equal as they stand.

    Attributes:
        line: What is written down; see docs/reference/file-formats.md.
        names: Names of the weights.
    """

    line: dict[str, Any]
    names: list[str]

    @property
    def rollout_id(self) -> int:
        """Which rollout."""
        return int(self.line["rollout_id"])

    @property
    def index(self) -> list[int]:
        """The samples' numbers."""
        return list(self.line["index"])

    @property
    def shards(self) -> list[int]:
        """Of what each data-parallel rank trains on."""
        return list(self.line["shards"])

    @property
    def fields(self) -> set[str]:
        """Names of the samples' fields."""
        return set(self.line["samples"])

    def field(self, name: str) -> NDArray[np.uint32] | None:
        """Of a field of each sample; ``None`` if they have no such field."""
        text = self.line["samples"].get(name)
        return None if text is None else _array(text)

    @property
    def weights(self) -> NDArray[np.uint32]:
        """Of the weights after the last step [names, L]; nothing where they were not trained."""
        return _array(self.line["weights"]).reshape(len(self.names), -1) if "weights" in self.line else _NO_WEIGHTS


class SumLog:
    """Writes a line for each rollout, after those of the first ``iteration`` ones."""

    def __init__(self, output_dir: Path, iteration: int | None) -> None:
        self._path = output_dir / SUMS_FILE
        kept, self._names = [], list[str]()
        for line in json_lines(self._path) if iteration else ():
            if line["rollout_id"] >= (iteration or 0):
                break
            kept.append(json.dumps(line) + "\n")
            self._names = line.get("names", self._names)
        write_whole(self._path, "".join(kept))
        self._file = open_to_append(self._path)

    def log(self, batch: ReadyRollout, report: TrainReport) -> None:
        """Write one rollout's; the names of weights stand where they are new."""
        line: dict[str, Any] = {"rollout_id": batch.rollout_id, "shards": batch.shard_sums}
        line["samples"] = {name: _text(values) for name, values in batch.sample_sums.items() if name != "index"}
        line["index"] = batch.sample_sums["index"].tolist() if "index" in batch.sample_sums else []
        if report.weight_sums is not None:
            if report.weight_names != self._names:
                self._names = line["names"] = report.weight_names
            line["weights"] = _text(report.weight_sums)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_sums(output_dir: Path) -> Iterator[StepSums]:
    """The checksums of each rollout, in order; a last line that a crash cut off is left out."""
    names: list[str] = []
    for line in json_lines(output_dir / SUMS_FILE):
        names = line.get("names", names)
        yield StepSums(line, names)


def read_pairs(first: Path, second: Path) -> Iterator[tuple[StepSums, StepSums]]:
    """The checksums of each rollout that both runs have, in order; a replay or a part of a run may begin later."""
    theirs = read_sums(second)
    other = next(theirs, None)
    for one in read_sums(first):
        while other is not None and other.rollout_id < one.rollout_id:
            other = next(theirs, None)
        if other is not None and other.rollout_id == one.rollout_id:
            yield one, other


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file, as large as a run is long; a last one that a crash cut off is left out."""
    if not path.exists():
        return
    with open_file(path) as file:
        while text := file.readline(MOST_BYTES):
            try:
                yield json.loads(text)
            except (ValueError, RecursionError):
                return


def _text(values: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, "<u4").tobytes()).decode()


def _array(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(base64.b64decode(text), "<u4")
