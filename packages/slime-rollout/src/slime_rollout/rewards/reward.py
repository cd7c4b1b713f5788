"""What scores a sample, chosen by the settings."""

from __future__ import annotations

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.interfaces import Reward
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.rewards.custom import CustomReward
from slime_rollout.rewards.rules import RULES, Rule


class RuleReward:
    """A rule that compares the response with the label.

    Args:
        rule: Takes response and label, gives the reward. Fast: it runs on the event loop.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    async def __call__(self, sample: Sample) -> float:
        """The rule's value.

        Raises:
            DataError: The sample has no label.
        """
        if sample.label is None:
            raise DataError(f"sample {sample.index} has no label to compare its response with")
        return self._rule(sample.response, sample.label)


def make_reward(config: RolloutConfig, hook_args: HookArgs) -> Reward:
    """What ``config`` chooses. An own function is loaded and looked at here, before anything is generated.

    Raises:
        ConfigError: The own function cannot be loaded, or does not take ``(args, sample)``.
    """
    if config.custom_rm_path is not None:
        return CustomReward(config.custom_rm_path, hook_args, timeout=config.rm_timeout)
    return RuleReward(RULES[config.rule or ""])
