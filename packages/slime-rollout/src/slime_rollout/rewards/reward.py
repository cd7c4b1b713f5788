"""What scores a sample, chosen by the settings."""

from __future__ import annotations

from collections.abc import Iterable

from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, Reward
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.rewards.batched import BatchedFunction, BatchedReward, load_batched
from slime_rollout.rewards.by_rule import RowRuleReward, RuleRewards
from slime_rollout.rewards.custom import FLAG, CustomReward
from slime_rollout.rewards.tolerant import (
    WITH_A_FUNCTION,
    WITH_BATCHES,
    NoTolerance,
    Patience,
    Tolerance,
    Tolerant,
    TolerantGroup,
)


class ZeroReward:
    """0 for every response: what remains of the reward where a teacher alone trains."""

    async def __call__(self, sample: Sample) -> float:
        """0."""
        return 0.0


def make_reward(
    config: RolloutConfig,
    hook_args: HookArgs,
    *,
    rules: RuleRewards | None = None,
    names: Iterable[str] | None = None,
    strict: bool = False,
) -> Reward:
    """What ``config`` chooses. An own function is loaded and looked at here, before anything is generated.

    Args:
        config: The settings.
        hook_args: Every flag by its name, for own functions.
        rules: The rules' rewards, to be shared.
        names: Names that rewards have, as for `Tolerance`; by default that of ``--reward-key``, if there is one.
        strict: Raise what an own function does wrong as `VerifierError`, instead of a reward of 0.

    Raises:
        ConfigError: The own function cannot be loaded, or does not take ``(args, sample)``, ``(args, samples)``, or
            as a class the arguments of ``--custom-rm-kwargs``.
    """
    if config.custom_rm_path is not None:
        batched = _batched(config, hook_args)
        if batched is not None:
            return BatchedReward(TolerantGroup(batched, _tolerance(config, names, strict, WITH_BATCHES)))
        single = CustomReward(config.custom_rm_path, hook_args, timeout=config.reward_timeout)
        return Tolerant(single, _tolerance(config, names, strict, WITH_A_FUNCTION))
    if config.rule is None:
        return ZeroReward()
    return RowRuleReward(config, rules or RuleRewards(), _names(config, names))


def make_group_reward(
    config: RolloutConfig, hook_args: HookArgs, *, names: Iterable[str] | None = None, strict: bool = False
) -> GroupReward | None:
    """The own function that scores the samples of a prompt together, with ``--group-rm``.

    Args:
        config: The settings.
        hook_args: Every flag by its name.
        names: As for :func:`make_reward`.
        strict: As for :func:`make_reward`.

    Raises:
        ConfigError: It cannot be loaded, or does not take ``(args, samples)``.
    """
    if not config.group_rm:
        return None
    batched = _batched(config, hook_args)
    return TolerantGroup(batched, _tolerance(config, names, strict, WITH_A_FUNCTION)) if batched else None


def _batched(config: RolloutConfig, hook_args: HookArgs) -> BatchedFunction | None:
    function = load_batched(
        config.custom_rm_path or "", hook_args, kwargs=config.custom_rm_arguments, always=config.group_rm
    )
    if function is None:
        return None
    return BatchedFunction(config.custom_rm_path or "", function, timeout=config.reward_timeout)


def _tolerance(config: RolloutConfig, names: Iterable[str] | None, strict: bool, patience: Patience) -> Tolerance:
    if strict:
        return NoTolerance()
    return Tolerance(
        drop=config.rm_on_failure == "drop",
        names=_names(config, names),
        name=f"{FLAG} {config.custom_rm_path}",
        patience=patience,
    )


def _names(config: RolloutConfig, names: Iterable[str] | None) -> set[str]:
    if names is not None:
        return set(names)
    return set() if config.reward_key is None else {config.reward_key}
