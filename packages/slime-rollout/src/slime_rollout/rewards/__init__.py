"""Scores for responses: a rule by name, a service, or a function of the user's."""

from slime_rollout.errors import VerifierError
from slime_rollout.rewards.batched import BatchedFunction, BatchedReward
from slime_rollout.rewards.by_rule import RandomReward, RowRuleReward, RuleReward, RuleRewards
from slime_rollout.rewards.custom import CustomReward
from slime_rollout.rewards.pool import VerifierPool
from slime_rollout.rewards.registry import check_label, find_rule
from slime_rollout.rewards.remote import RemoteReward
from slime_rollout.rewards.reward import ZeroReward, make_group_reward, make_reward
from slime_rollout.rewards.shared import Scorer, Scorers
from slime_rollout.rewards.tolerant import Tolerance, Tolerant, TolerantGroup

__all__ = [
    "BatchedFunction",
    "BatchedReward",
    "CustomReward",
    "RandomReward",
    "RemoteReward",
    "RowRuleReward",
    "RuleReward",
    "RuleRewards",
    "Scorer",
    "Scorers",
    "Tolerance",
    "Tolerant",
    "TolerantGroup",
    "VerifierError",
    "VerifierPool",
    "ZeroReward",
    "check_label",
    "find_rule",
    "make_group_reward",
    "make_reward",
]
