"""A generate function whose responses all have --rollout-max-response-len tokens, and rewards that do not depend on
them.
"""

from __future__ import annotations

from typing import Any

from slime_core.types import Sample
from slime_rollout.generate import Trajectory


async def custom_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn, which goes on after the model would end it."""
    trajectory = Trajectory.start(sample)
    await trajectory.generate(max_new_tokens=args.rollout_max_response_len, ignore_eos=True)
    return sample


async def reward(args: Any, sample: Sample) -> float:
    """0 and 1 in turn, so that every group has both and none is left out of training."""
    return float(sample.index % 2)
