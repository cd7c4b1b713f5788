"""Scores for responses: a rule by name, or a function of the user's."""

from slime_rollout.rewards.custom import CustomReward
from slime_rollout.rewards.reward import RuleReward, make_reward
from slime_rollout.rewards.rules import RULES, check_label, exact, first_integer, parse_integer

__all__ = [
    "RULES",
    "CustomReward",
    "RuleReward",
    "check_label",
    "exact",
    "first_integer",
    "make_reward",
    "parse_integer",
]
