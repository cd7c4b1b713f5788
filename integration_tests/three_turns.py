"""A generate function of three short turns, each followed by an observation."""

from __future__ import annotations

from typing import Any

from slime_core.types import Sample
from slime_rollout import Trajectory


async def custom_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The last observation is never read by the engine."""
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        await trajectory.generate(max_new_tokens=9)
        trajectory.observe(" = 4 +")
    return sample
