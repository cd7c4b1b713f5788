"""The rewards of a run and of its held-out sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, Reward
from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import EvalSet
from slime_rollout.rewards.by_rule import RuleRewards
from slime_rollout.rewards.reward import make_group_reward, make_reward


@dataclass(frozen=True)
class Scorer:
    """What scores samples one by one, or in its place all samples of a prompt."""

    reward: Reward
    group_reward: GroupReward | None


class Scorers:
    """What scores a run's rollouts and its held-out sets. What is scored alike shares processes, model and batches.

    Every own function is loaded and looked at here, before anything is generated.

    Args:
        config: The run's settings.
        hook_args: Every flag by its name, for own functions.
        eval_sets: The run's held-out sets.

    Raises:
        ConfigError: An own function cannot be loaded, or does not take the arguments it will get.
    """

    def __init__(self, config: RolloutConfig, hook_args: HookArgs, eval_sets: Sequence[EvalSet] = ()) -> None:
        self._made: dict[tuple[object, ...], Scorer] = {}
        self._rules = RuleRewards()
        self._keys: dict[tuple[object, ...], set[str | None]] = {}
        for one in (config, *(held_out.config for held_out in eval_sets)):
            self._keys.setdefault(_choice(one), set()).add(one.reward_key)
        self._make(config, hook_args)
        for held_out in eval_sets:
            with held_out.named():
                self._make(held_out.config, hook_args)

    def of(self, config: RolloutConfig) -> Scorer:
        """What scores for the run's ``config``, or that of one of its held-out sets."""
        return self._made[_choice(config)]

    def _make(self, config: RolloutConfig, hook_args: HookArgs) -> None:
        choice = _choice(config)
        if choice not in self._made:
            names = self._names(choice)
            self._made[choice] = Scorer(
                make_reward(config, hook_args, rules=self._rules, names=names),
                make_group_reward(config, hook_args, names=names),
            )

    def _names(self, choice: tuple[object, ...]) -> set[str]:
        """The names that rewards have for all who share them; none where somebody gives no name: a number does then."""
        names = {key for key in self._keys[choice] if key is not None}
        return set() if None in self._keys[choice] else names


def _choice(config: RolloutConfig) -> tuple[object, ...]:
    """The settings that a held-out set may have of its own."""
    kwargs = json.dumps(config.custom_rm_arguments, sort_keys=True)
    return config.rule, config.custom_rm_path, kwargs, config.group_rm, config.rm_url
