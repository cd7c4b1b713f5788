"""Finished rollouts on disk, and the data source's state after each: whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.files import read_json, write_whole
from slime_core.types import RolloutColumns

_NAME = re.compile(r"rollout_(\d{7,})\.npz")


class RolloutStore:
    """A directory with a file per rollout, ``rollout_0000012.npz``; see :mod:`slime_core.types.arrays`.

    A rollout is written before it is trained on, so that a run that is killed trains on the same samples when it
    continues. Next to each lies what the data source continues from, ``source_0000012.json``, if it was given. One
    process writes at a time.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def path(self, rollout_id: int) -> Path:
        """The file of a rollout, whether it exists or not."""
        return self._directory / f"rollout_{rollout_id:07d}.npz"

    def write(self, batch: RolloutColumns, source_state: dict[str, Any] | None = None) -> Path:
        """Write a rollout; its file is either whole or not there, power failures included. Returns the file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if source_state is not None:  # first, so that each rollout has its state
            write_whole(self._state_path(batch.rollout_id), json.dumps(source_state))
        batch.write(self.path(batch.rollout_id))
        return self.path(batch.rollout_id)

    def read_source_state(self, rollout_id: int) -> dict[str, Any]:
        """State of the data source after a rollout; a `DataError` if its file is missing or torn."""
        file = self._state_path(rollout_id)
        try:
            state: dict[str, Any] = read_json(file)
        except (OSError, ValueError, DataError) as error:
            raise DataError(
                f"{file}, which the data goes on from, is missing or torn ({error}); delete {self.path(rollout_id)}, "
                "and that rollout is generated again"
            ) from error
        return state

    def read(self, rollout_id: int) -> RolloutColumns:
        """Read a rollout; a `DataError` if it is missing, torn or of an older slime."""
        file = self.path(rollout_id)
        if not self.has(rollout_id):
            raise DataError(f"{self._directory} has no rollout {rollout_id}; it has {_ranges(self.ids())}")
        try:
            batch = RolloutColumns.read(file)
        except (OSError, DataError) as error:
            raise DataError(
                f"{file} is torn or not a rollout ({error}); delete it, and that rollout is generated again"
            ) from error
        if batch.rollout_id != rollout_id:
            raise DataError(f"{file} holds rollout {batch.rollout_id}; give it its own name back, or delete it")
        return batch

    def has(self, rollout_id: int) -> bool:
        """Whether the rollout is in the directory; a `DataError` if an older slime wrote it."""
        older = self.path(rollout_id).with_suffix(".jsonl")
        found = self.path(rollout_id).exists()
        if not found and older.exists():
            raise DataError(
                f"{older} was written by an older slime, in a format that this one does not read; delete it, and that "
                "rollout is generated again"
            )
        return found

    def ids(self) -> list[int]:
        """Numbers of the rollouts in the directory, ascending."""
        if not self._directory.is_dir():
            return []
        matches = (_NAME.fullmatch(file.name) for file in self._directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def discard_through(self, rollout_id: int) -> None:
        """Delete the rollouts up to and including ``rollout_id``, oldest first."""
        for number in self.ids():
            if number <= rollout_id:
                self.path(number).unlink(missing_ok=True)
                self._state_path(number).unlink(missing_ok=True)

    def _state_path(self, rollout_id: int) -> Path:
        return self._directory / f"source_{rollout_id:07d}.json"


def _ranges(numbers: list[int]) -> str:
    """``0–3, 7`` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}–{last}" if first != last else str(first) for first, last in spans) or "none"
