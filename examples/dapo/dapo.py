"""The reward and the group filter of DAPO (Yu et al. 2025, sections 3.2 and 3.4).

Its other two parts are flags: --eps-clip-high (clip-higher) and --calculate-per-token-loss. The file of
--custom-config-path has `answer_rule`, the rule that scores an answer, and `overlong_buffer`, in tokens.
"""

from __future__ import annotations

from typing import Any

from slime_core.types import Drop, Keep
from slime_rollout.errors import REWARD_FAILURE
from slime_rollout.rewards.rules import find_rule


def custom_rm(args: Any, sample: Any) -> dict[str, float]:
    """`acc`: 1 for the right answer, else 0. `score`: 1 or -1 for that, less the penalty for length."""
    value = find_rule(args.answer_rule).score(sample.response, sample.label, sample.metadata)
    accuracy = float(value["acc"] if isinstance(value, dict) else value)
    penalty = overlong_penalty(sample.response_length, args.rollout_max_response_len, args.overlong_buffer)
    return {"score": 2 * accuracy - 1 - penalty, "acc": accuracy}


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """0 up to `longest - buffer` tokens, from there growing evenly to 1 at `longest` (soft overlong punishment)."""
    return min(max(length - (longest - buffer), 0) / buffer, 1.0)


def keep_mixed(args: Any, group: Any) -> Keep | Drop:
    """Train only on groups with right and wrong answers.

    Penalties alone may make rewards differ, so it is not their spread that counts. A right answer scores 0 at least, a
    wrong one -1 at most. A sample that could not be scored has 0, too, and counts as wrong.
    """
    scored = [sample for sample in group if REWARD_FAILURE not in sample.metadata]
    right = sum(sample.scalar_reward(args.reward_key) >= 0 for sample in scored)
    if 0 < right < len(group):
        return Keep()
    return Drop("all_right" if right else "all_wrong")
