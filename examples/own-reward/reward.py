"""The reward of this task: plain words. It is all that says what is to be learned; change it."""

from __future__ import annotations

import re
from typing import Any

SHORT = 4  # letters of a short word
ENOUGH = 12  # words that a response must have
DIFFERENT = 0.6  # share of different words, below which a response repeats itself


async def score(args: Any, sample: Any, **kwargs: Any) -> float:
    """The share of short words, less if the response has few words or repeats itself: from 0 to 1.

    Args:
        args: Every flag of the run by its name, such as `args.rollout_max_response_len`.
        sample: `sample.prompt`, `sample.response`, `sample.label` and `sample.metadata` of its row.
        kwargs: Nothing now.
    """
    words = re.findall(r"[a-z]+", sample.response.lower())
    if not words:
        return 0.0
    short = sum(len(word) <= SHORT for word in words) / len(words)
    long_enough = min(1.0, len(words) / ENOUGH)
    varied = min(1.0, len(set(words)) / len(words) / DIFFERENT)
    return short * long_enough * varied
