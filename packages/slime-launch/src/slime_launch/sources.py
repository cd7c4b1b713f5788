"""Where the batches of a run come from: engines that generate, rows of a data set, or rollouts that were written down.

Whatever it is, it lives in one Ray actor (`slime_launch.rollouts`); this file starts nothing and imports no Ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.interfaces import Batches
from slime_core.types import Progress, RolloutBatch, RolloutColumns
from slime_rollout.engine import EngineConfig, EngineLauncher
from slime_rollout.service import DataService, DataSpec, GenerationService, GenerationSpec


@dataclasses.dataclass(frozen=True)
class RecordedSpec:
    """Rollouts from files: ``template`` has ``{rollout_id}`` in it."""

    template: str


SourceSpec = GenerationSpec | DataSpec | RecordedSpec
"""Settings of a source. Only the first kind has engines, which take weights, and scores held-out prompts."""


def make_source(spec: SourceSpec, make_launcher: Callable[[EngineConfig], EngineLauncher] | None = None) -> Batches:
    """The source of these settings, not started; ``make_launcher`` gives what starts its engines, if it has some."""
    if isinstance(spec, RecordedSpec):
        return RecordedRollouts(spec.template)
    return DataService(spec) if isinstance(spec, DataSpec) else GenerationService(spec, make_launcher)


class RecordedRollouts:
    """Rollouts of ``--load-debug-rollout-data``, as if they had just been generated: the number says all."""

    def __init__(self, template: str) -> None:
        self._template = template

    def start(self) -> None:
        """Nothing has to be started."""

    def generate(self, rollout_id: int) -> RolloutBatch:
        """The rollout in the file of this number.

        Raises:
            DataError: The file is missing, torn, or not a rollout.
        """
        path = Path(self._template.format(rollout_id=rollout_id))
        if not path.is_file():
            raise DataError(f"--load-debug-rollout-data: {path}, rollout {rollout_id}, does not exist")
        return dataclasses.replace(RolloutColumns.read(path), rollout_id=rollout_id).batch()

    def account(self) -> None:
        """Nobody counts them."""

    def state_dict(self) -> dict[str, Any]:
        """There is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`state_dict`."""

    def cancel(self) -> None:
        """Nothing takes long."""

    def progress(self) -> Progress:
        """Nothing takes long."""
        return Progress()

    def close(self) -> None:
        """Nothing has to be stopped."""
