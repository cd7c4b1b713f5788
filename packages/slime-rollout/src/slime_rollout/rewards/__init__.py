"""Rewards of responses: a rule by name, a service, or a custom function."""

from slime_rollout.errors import VerifierError
from slime_rollout.rewards.pool import VerifierPool
from slime_rollout.rewards.rules import check_label, find_rule
from slime_rollout.rewards.scorers import Scorers, make_scorer

__all__ = ["Scorers", "VerifierError", "VerifierPool", "check_label", "find_rule", "make_scorer"]
