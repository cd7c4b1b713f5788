"""A generate function whose responses have log-normal lengths, and rewards, from a sample's index alone."""

from __future__ import annotations

import math
import random
from typing import Any

from slime_core.types import Sample
from slime_rollout.generate import Trajectory

MEDIAN, SIGMA = 20, 1.0
"""Of the lengths in tokens, and the spread of their logarithms."""


async def custom_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The turn goes on to its length, whatever the model writes; one that was cut off to what is left of it."""
    drawn = MEDIAN * math.exp(random.Random(sample.index).gauss(0.0, SIGMA))
    length = min(max(1, round(drawn)), args.rollout_max_response_len)
    trajectory = Trajectory.start(sample)
    await trajectory.generate(max_new_tokens=max(1, length - sample.response_length), ignore_eos=True)
    return sample


async def reward(args: Any, sample: Sample) -> float:
    """0 and 1 in turn, so that every group has both and none is left out of training."""
    return float(sample.index % 2)
