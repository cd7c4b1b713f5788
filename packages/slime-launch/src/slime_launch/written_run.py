"""The files of a finished or a running run, for what compares runs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from slime_core.errors import SlimeError
from slime_core.files import naming_damage, read_json
from slime_core.types import RolloutColumns
from slime_launch.errors import PreflightError
from slime_launch.resolved import FILE_NAME as SETTINGS_FILE
from slime_launch.step_sums import SUMS_FILE, read_sums
from slime_launch.tracking import METRICS_FILE, Row, read_rows
from slime_rollout.service import RolloutStore

_PARTS = ("packages", "engine_packages", "environment")


class WrittenRun:
    """One run, as far as it has written itself down."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / SUMS_FILE).is_file():
            raise PreflightError(
                f"{directory} has no {SUMS_FILE}, which a run of `slime-launch train` writes; give its --output-dir"
            )
        if next(read_sums(directory), None) is None:
            raise PreflightError(
                f"{directory} was not trained on any rollout: its {SUMS_FILE} is empty; give another run"
            )
        try:
            self.resolved: dict[str, Any] = read_json(directory / SETTINGS_FILE)
        except (OSError, ValueError) as error:
            raise PreflightError(f"{directory / SETTINGS_FILE} cannot be read ({error}); give another run") from error
        with naming_damage(directory / SETTINGS_FILE):
            for entries in (self.resolved["settings"], *(self.resolved.get(part) or {} for part in _PARTS)):
                _ = entries.items()
            _ = [entry["value"] for entry in self.resolved["settings"].values()]
        self.steps: dict[int, list[Row]] = {}
        with naming_damage(directory / METRICS_FILE):
            for row in read_rows(directory):
                if row["kind"] == "train":
                    self.steps.setdefault(row["rollout_id"], []).append(row)

    def setting(self, name: str) -> Any:
        """The value of a setting."""
        return self.resolved["settings"].get(name, {}).get("value")

    def rollout(self, rollout_id: int) -> RolloutColumns | None:
        """A rollout, if its file is still there."""
        for directory in filter(None, (self.setting("save"), self.directory)):
            store = RolloutStore(Path(directory) / "rollouts")
            with contextlib.suppress(SlimeError):
                if store.has(rollout_id):
                    return store.read(rollout_id)
        return None
