"""Finished rollouts on disk: whole or not at all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from slime_core.errors import DataError
from slime_core.types import RolloutBatch

_NAME = re.compile(r"rollout_(\d{7,})\.jsonl")


class RolloutStore:
    """A directory with a JSON Lines file per rollout, ``rollout_0000012.jsonl``.

    A rollout is written before it is trained on, so that a run that is killed trains on the same samples when it
    continues. The files are for reading, too: a head, then a line per sample.

    Args:
        directory: Made with the first write. One process writes to it at a time.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def path(self, rollout_id: int) -> Path:
        """The file of a rollout, whether it is there or not."""
        return self._directory / f"rollout_{rollout_id:07d}.jsonl"

    def write(self, batch: RolloutBatch) -> Path:
        """Write a rollout so that its file is either whole or not there, power failures included.

        Returns:
            The file.

        Raises:
            OSError: The directory can't be written; no file is left behind half-written under its name.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self.path(batch.rollout_id)
        part = target.with_suffix(".part")
        text = batch.to_jsonl()
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
        _sync_directory(self._directory)
        return target

    def read(self, rollout_id: int) -> RolloutBatch:
        """Read a rollout.

        Raises:
            DataError: There is no such rollout, or its file is torn; says which.
        """
        file = self.path(rollout_id)
        if not file.exists():
            raise DataError(f"{self._directory} has no rollout {rollout_id}; it has {_ranges(self.ids())}")
        try:
            batch = RolloutBatch.from_jsonl(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, DataError) as error:
            raise DataError(
                f"{file} is torn or not a rollout ({error}); delete it, and that rollout is generated again"
            ) from error
        if batch.rollout_id != rollout_id:
            raise DataError(f"{file} holds rollout {batch.rollout_id}; give it its own name back, or delete it")
        return batch

    def ids(self) -> list[int]:
        """Numbers of the rollouts that are there, ascending."""
        if not self._directory.is_dir():
            return []
        matches = (_NAME.fullmatch(file.name) for file in self._directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def discard_through(self, rollout_id: int) -> None:
        """Delete the rollouts up to ``rollout_id``, that one included, oldest first."""
        for number in self.ids():
            if number <= rollout_id:
                self.path(number).unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Make a rename last: the directory's entry is data of the directory."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ranges(numbers: list[int]) -> str:
    """``0–3, 7`` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}–{last}" if first != last else str(first) for first, last in spans) or "none"
