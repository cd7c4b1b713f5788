"""Rewards of responses: a rule by name, a service, or a custom function."""

from slime_rollout.errors import VerifierError
from slime_rollout.rewards.custom import BatchedReward, CustomReward
from slime_rollout.rewards.pool import VerifierPool
from slime_rollout.rewards.registry import check_label, find_rule
from slime_rollout.rewards.scorers import (
    RemoteReward,
    RowRuleReward,
    RuleReward,
    Scorer,
    Scorers,
    make_group_reward,
    make_reward,
)

__all__ = [
    "BatchedReward",
    "CustomReward",
    "RemoteReward",
    "RowRuleReward",
    "RuleReward",
    "Scorer",
    "Scorers",
    "VerifierError",
    "VerifierPool",
    "check_label",
    "find_rule",
    "make_group_reward",
    "make_reward",
]
