"""The rewards that the settings choose, for a run and its held-out sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, Reward, RewardValue
from slime_core.types import Sample
from slime_rollout.config import REMOTE_RULES, RolloutConfig
from slime_rollout.errors import FailureLimit, RewardError, Tolerance, VerifierError
from slime_rollout.eval_sets import EvalSet
from slime_rollout.http import HttpError, Service
from slime_rollout.rewards.custom import FLAG, BatchedReward, CustomReward
from slime_rollout.rewards.pool import VerifierPool
from slime_rollout.rewards.rules import BOXED, Rule, find_rule, last_boxed, read_reward, rule_of_row

WITH_A_FUNCTION = FailureLimit(calls=64)  # twice the calls of a custom function that run, and may fail, at once
WITH_BATCHES = FailureLimit(calls=8, samples=64)  # one call runs at a time, with up to 64 samples
# A service is restarted by somebody else, which may take long; four times the samples that it gets at once.
WITH_A_SERVICE = FailureLimit(samples=256, seconds=1800.0)

RuleRewards = dict[tuple[str, str | None], Reward]
"""The rewards by rule and service, made when they are needed. Shared: they hold processes and connections."""


@dataclass(frozen=True)
class Scorer:
    """Scores samples one by one, or all samples of a prompt together where there is a ``group_reward``."""

    reward: Reward
    group_reward: GroupReward | None


class Scorers:
    """Scores a run's rollouts and its held-out sets. Equal settings share processes, models and batches.

    Custom functions are loaded and checked here, before anything is generated.

    Args:
        config: The run's settings.
        hook_args: Every flag by its name, for custom functions.
        eval_sets: The run's held-out sets.

    Raises:
        ConfigError: A custom function cannot be loaded, or does not take the arguments it will get.
    """

    def __init__(self, config: RolloutConfig, hook_args: HookArgs, eval_sets: Sequence[EvalSet] = ()) -> None:
        self._hook_args = hook_args
        self._made: dict[tuple[object, ...], Scorer] = {}
        self._rules: RuleRewards = {}
        self._keys: dict[tuple[object, ...], set[str | None]] = {}
        for one in (config, *(held_out.config for held_out in eval_sets)):
            self._keys.setdefault(_choice(one), set()).add(one.rewards.reward_key)
        self._make(config)
        for held_out in eval_sets:
            with held_out.named():
                self._make(held_out.config)

    def of(self, config: RolloutConfig) -> Scorer:
        """The scorer of the run's ``config``, or of that of one of its held-out sets."""
        return self._made[_choice(config)]

    def _make(self, config: RolloutConfig) -> None:
        choice = _choice(config)
        if choice in self._made:
            return
        # The names that rewards have for all who share them; none where one of them has none: then it is a number.
        names = set() if None in self._keys[choice] else self._keys[choice]
        self._made[choice] = Scorer(
            make_reward(config, self._hook_args, rules=self._rules, names=names),
            make_group_reward(config, self._hook_args, names=names),
        )


def _choice(config: RolloutConfig) -> tuple[object, ...]:
    """The reward settings that a held-out set may have."""
    kwargs = json.dumps(config.rewards.custom_rm_arguments, sort_keys=True)
    return config.rewards.rule, config.rewards.custom_rm_path, kwargs, config.rewards.group_rm, config.rewards.rm_url


def make_reward(
    config: RolloutConfig,
    hook_args: HookArgs,
    *,
    rules: RuleRewards | None = None,
    names: Collection[str | None] | None = None,
    strict: bool = False,
) -> Reward:
    """The reward that ``config`` chooses. A custom function is loaded and checked here.

    Args:
        config: The settings.
        hook_args: Every flag by its name, for custom functions.
        rules: Rewards by rule, to be shared.
        names: Names that rewards have, as for `Tolerance`; by default that of ``--reward-key``, if there is one.
        strict: Raise failures of a custom function as `VerifierError`, instead of a reward of 0.

    Raises:
        ConfigError: The custom function cannot be loaded, or does not take its arguments.
    """
    if config.rewards.custom_rm_path is not None:
        custom = _custom(config, hook_args)
        if custom.is_batched:
            return BatchedReward(_tolerance(config, names, strict, WITH_BATCHES).group(custom.score))
        return _tolerance(config, names, strict, WITH_A_FUNCTION).each(custom)
    if config.rewards.rule is None:
        return zero_reward
    return RowRuleReward(config, {} if rules is None else rules, _names(config, names))


def make_group_reward(
    config: RolloutConfig, hook_args: HookArgs, *, names: Collection[str | None] | None = None, strict: bool = False
) -> GroupReward | None:
    """The custom function that scores the samples of a prompt together; ``None`` without ``--group-rm``.

    Arguments and errors are those of :func:`make_reward`.
    """
    if not config.rewards.group_rm:
        return None
    return _tolerance(config, names, strict, WITH_A_FUNCTION).group(_custom(config, hook_args).score)


def _custom(config: RolloutConfig, hook_args: HookArgs) -> CustomReward:
    return CustomReward(
        config.rewards.custom_rm_path or "",
        hook_args,
        timeout=config.rewards.reward_timeout,
        kwargs=config.rewards.custom_rm_arguments,
        group=config.rewards.group_rm,
    )


def _tolerance(
    config: RolloutConfig, names: Collection[str | None] | None, strict: bool, limit: FailureLimit
) -> Tolerance:
    return Tolerance(
        drop=config.rewards.rm_on_failure == "drop",
        names=_names(config, names),
        name=f"{FLAG} {config.rewards.custom_rm_path}",
        limit=limit,
        strict=strict,
    )


def _names(config: RolloutConfig, names: Collection[str | None] | None) -> set[str]:
    given = {config.rewards.reward_key} if names is None else names
    return {name for name in given if name is not None}


class RowRuleReward:
    """Scores each sample by the rule that its row's metadata names as ``rm_type``, or else by the run's.

    Args:
        config: The run's rule, limits, and the address of the service.
        rewards: The rewards that exist; further ones are added when they are needed.
        names: Names of a service's rewards, as for `Tolerance`.
    """

    def __init__(self, config: RolloutConfig, rewards: RuleRewards, names: Collection[str] = ()) -> None:
        self._config, self._rewards, self._names = config, rewards, names
        self._rule = config.rewards.rule or ""

    async def __call__(self, sample: Sample) -> RewardValue:
        """The rule's value."""
        try:
            rule = rule_of_row(sample.metadata, self._rule)
        except DataError as error:
            raise DataError(f"sample {sample.index}: {error}") from None
        if rule in REMOTE_RULES and self._rule not in REMOTE_RULES:
            raise DataError(f"sample {sample.index}: its rule {rule} needs --rm-type remote_rm with --rm-url")
        key = rule, self._config.rewards.rm_url if rule in REMOTE_RULES else None
        if key not in self._rewards:
            self._rewards[key] = self._make(rule)
        return await self._rewards[key](sample)

    def _make(self, name: str) -> Reward:
        config = self._config
        if name == "random":
            return random_reward
        drop, timeout = config.rewards.rm_on_failure == "drop", config.rewards.timeout_of_rule(name)
        if name in REMOTE_RULES:
            remote = RemoteReward(config.rewards.rm_url or "", timeout=timeout, boxed=name.startswith(BOXED))
            service = f"the service of --rm-url {config.rewards.rm_url}"
            return Tolerance(names=self._names, drop=drop, name=service, limit=WITH_A_SERVICE).each(remote)
        rule = find_rule(name)
        if rule.instant:
            return RuleReward(rule)
        memory = int(config.rewards.rm_memory_limit * 2**30)
        pool = VerifierPool(name, workers=config.rewards.rm_workers, time_limit=timeout, memory_limit=memory)
        return Tolerance(rule.wrong, drop=drop).each(RuleReward(rule, pool))


class RuleReward:
    """A rule that compares the response with the label, in a pool of processes or, without one, on the event loop."""

    def __init__(self, rule: Rule, pool: VerifierPool | None = None) -> None:
        self._rule = rule
        self._pool = pool

    async def __call__(self, sample: Sample) -> RewardValue:
        """The rule's value."""
        if sample.label is None:
            raise DataError(f"sample {sample.index} has no label to compare its response with")
        metadata = {key: sample.metadata[key] for key in self._rule.metadata_keys if key in sample.metadata}
        if self._pool is None:
            return self._rule.score(sample.response, sample.label, metadata)
        return await self._pool.score(sample.response, sample.label, metadata)


async def random_reward(sample: Sample) -> float:
    """0 or 1 with equal chance, the same for the same sample and response: a baseline that must teach nothing."""
    text = f"{sample.index}:{sample.response}".encode(errors="replace")
    return float(hashlib.blake2b(text, digest_size=1).digest()[0] & 1)


async def zero_reward(sample: Sample) -> float:
    """0 for every response, where a teacher alone trains."""
    return 0.0


class RemoteReward:
    r"""Sends ``{"prompt", "response", "label"}`` as JSON; the answer is a number, or an object of numbers.

    Refused connections, 408, 429 and 5xx are tried four times; any other 4xx ends the run: every sample would get it.

    Args:
        url: Address of the service.
        timeout: Time limit of one attempt, in seconds.
        boxed: Send as response what the last ``\boxed{…}`` holds: nothing where there is none.
    """

    def __init__(self, url: str, *, timeout: float, boxed: bool = False) -> None:
        self._service = Service(url, timeout=timeout)
        self._boxed = boxed

    async def __call__(self, sample: Sample) -> RewardValue:
        """The service's value.

        Raises:
            VerifierError: The service failed, or its answer is not a reward.
            RewardError: It refused the request.
        """
        response = last_boxed(sample.response) or "" if self._boxed else sample.response
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        try:
            answer = await self._service.ask(payload)
        except HttpError as error:
            if error.may_pass:
                raise VerifierError(str(error)) from error
            raise RewardError(f"--rm-url refused sample {sample.index}: {error}") from error
        reward = read_reward(answer)
        if reward is None:
            raise VerifierError(
                f"{self._service.url} answered {str(answer)[:200]!r}, not a finite number or an object of them"
            )
        return reward
