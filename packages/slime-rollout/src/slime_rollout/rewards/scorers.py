"""The rewards that the settings choose, for a run and its held-out sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, Reward, RewardValue
from slime_core.redact import redacted
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import FailureLimit, RewardError, Tolerance, VerifierError
from slime_rollout.eval_sets import EvalSet
from slime_rollout.http import HttpError, Service
from slime_rollout.reward_config import REMOTE_RULES
from slime_rollout.rewards.answers import last_boxed
from slime_rollout.rewards.custom import FLAG, BatchedReward, CustomReward
from slime_rollout.rewards.pool import VerifierPool
from slime_rollout.rewards.rules import BOXED, Rule, find_rule, read_reward, rule_of_row

WITH_A_FUNCTION = FailureLimit(calls=64)  # twice the calls of a custom function that run, and may fail, at once
WITH_BATCHES = FailureLimit(calls=8, samples=64)  # one call runs at a time, with up to 64 samples
# A service is restarted by somebody else, which may take long; four times the samples that it gets at once.
WITH_A_SERVICE = FailureLimit(samples=256, seconds=1800.0)

_MOST_BYTES = 1_000_000
"""Largest answer of a reward service."""

RuleRewards = dict[tuple[str, str | None], Reward]
"""The rewards by rule and service, made when they are needed. Shared: they hold processes and connections."""


async def zero_reward(sample: Sample) -> float:
    """0 for every response, where a teacher alone trains."""
    return 0.0


@dataclass(frozen=True)
class Scorer:
    """Scores samples one by one, or all samples of a prompt together where there is a ``group_reward``."""

    reward: Reward = zero_reward
    group_reward: GroupReward | None = None


class Scorers:
    """Scores a run's rollouts and held-out sets, by :func:`make_scorer`. Equal settings share processes and models."""

    def __init__(self, config: RolloutConfig, hook_args: HookArgs, eval_sets: Sequence[EvalSet] = ()) -> None:
        self._made: dict[tuple[object, ...], Scorer] = {}
        rules: RuleRewards = {}
        keys: dict[tuple[object, ...], set[str | None]] = {}
        for one in (config, *(held_out.config for held_out in eval_sets)):
            keys.setdefault(_choice(one), set()).add(one.rewards.reward_key)

        def make(config: RolloutConfig) -> None:
            if (choice := _choice(config)) not in self._made:
                self._made[choice] = make_scorer(config, hook_args, rules=rules, reward_keys=keys[choice])

        make(config)
        for held_out in eval_sets:
            with held_out.named():
                make(held_out.config)

    def of(self, config: RolloutConfig) -> Scorer:
        """The scorer of the run's ``config``, or of that of one of its held-out sets."""
        return self._made[_choice(config)]


def _choice(config: RolloutConfig) -> tuple[object, ...]:
    """The reward settings that a held-out set may have."""
    kwargs = json.dumps(config.rewards.custom_rm_arguments, sort_keys=True)
    return config.rewards.rule, config.rewards.custom_rm_path, kwargs, config.rewards.group_rm, config.rewards.rm_url


def make_scorer(
    config: RolloutConfig,
    hook_args: HookArgs,
    *,
    rules: RuleRewards | None = None,
    reward_keys: Collection[str | None] = (),
    strict: bool = False,
) -> Scorer:
    """The scorer of ``config``. A custom function is loaded and checked here, before anything is generated.

    ``reward_keys`` are those of everybody who shares the scorer, by default that of ``config`` alone. With ``strict``,
    failures of a custom function are raised as `VerifierError`; otherwise they are a reward of 0.
    """
    settings = config.rewards
    keys = set(reward_keys) or {settings.reward_key}
    names = {key for key in keys if key is not None and None not in keys}  # else some expect a number
    if settings.custom_rm_path is None:
        rules = {} if rules is None else rules
        return Scorer() if settings.rule is None else Scorer(RowRuleReward(config, rules, names))
    custom = CustomReward(
        settings.custom_rm_path,
        hook_args,
        timeout=settings.reward_timeout,
        kwargs=settings.custom_rm_arguments,
        group=settings.group_rm,
        keys=keys,
    )
    tolerance = Tolerance(
        drop=settings.rm_on_failure == "drop",
        replaces=settings.rm_on_failure == "replace",
        names=names,
        name=f"{FLAG} {settings.custom_rm_path}",
        limit=WITH_BATCHES if custom.is_batched and not settings.group_rm else WITH_A_FUNCTION,
        strict=strict,
    )
    if settings.group_rm:
        return Scorer(group_reward=tolerance.group(custom.score))
    return Scorer(BatchedReward(tolerance.group(custom.score)) if custom.is_batched else tolerance.each(custom))


class RowRuleReward:
    """Scores each sample by the rule that its row's metadata names as ``rm_type``, or else by the run's.

    Rewards that are not among ``rewards`` are added when they are needed. ``names``: of a service's rewards.
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
        settings = self._config.rewards
        if name == "random":
            return random_reward
        drop, replaces = (settings.rm_on_failure == one for one in ("drop", "replace"))
        if name in REMOTE_RULES:
            timeout, boxed = settings.timeout_of_rule(name), name.startswith(BOXED)
            remote = RemoteReward(settings.rm_url or "", timeout=timeout, boxed=boxed, keys=self._names)
            service = f"the service of --rm-url {redacted(settings.rm_url or '')}"
            tolerance = Tolerance(names=self._names, drop=drop, replaces=replaces, name=service, limit=WITH_A_SERVICE)
            return tolerance.each(remote)
        rule = find_rule(name)
        if rule.instant:
            return _rule_reward(rule)
        timeout, memory = settings.timeout_of_rule(name), int(settings.rm_memory_limit * 2**30)
        pool = VerifierPool(name, workers=settings.rm_workers, time_limit=timeout, memory_limit=memory)
        return Tolerance(rule.wrong, drop=drop, replaces=replaces).each(_rule_reward(rule, pool))


def _rule_reward(rule: Rule, pool: VerifierPool | None = None) -> Reward:
    """Scores in a pool of processes, or without one on the event loop."""

    async def scored(sample: Sample) -> RewardValue:
        if sample.label is None:
            raise DataError(f"sample {sample.index} has no label to compare its response with")
        metadata = {key: sample.metadata[key] for key in rule.metadata_keys if key in sample.metadata}
        if pool is None:
            return rule.score(sample.response, sample.label, metadata)
        return await pool.score(sample.response, sample.label, metadata)

    return scored


async def random_reward(sample: Sample) -> float:
    """0 or 1 with equal chance, the same for the same sample and response: a baseline that must teach nothing."""
    text = f"{sample.index}:{sample.response}".encode(errors="replace")
    return float(hashlib.blake2b(text, digest_size=1).digest()[0] & 1)


class RemoteReward:
    r"""Sends ``{"prompt", "response", "label"}`` as JSON; the answer is a number, or an object with some.

    Refused connections, 408, 429 and 5xx are tried four times; any other 4xx ends the run: every sample would get it.
    ``boxed`` sends as response what the last ``\boxed{…}`` holds, nothing where there is none. ``keys`` are parts that
    somebody trains on or reports; an object has one of them.
    """

    def __init__(self, url: str, *, timeout: float, boxed: bool = False, keys: Collection[str] = ()) -> None:
        self._service = Service(url, timeout=timeout)
        self._boxed, self._keys = boxed, frozenset(keys)

    async def __call__(self, sample: Sample) -> RewardValue:
        """The service's value. Raises `VerifierError` if it failed, `RewardError` if it refused the request."""
        response = last_boxed(sample.response) or "" if self._boxed else sample.response
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        try:
            answer = await self._service.ask(payload, most=_MOST_BYTES)
        except HttpError as error:
            if error.may_pass or (error.status is not None and error.status < 300):  # too large an answer
                raise VerifierError(str(error)) from error
            raise RewardError(f"--rm-url refused sample {sample.index}: {error}") from error
        reward = read_reward(answer, self._keys)
        said = redacted(f"{self._service.url} answered {str(answer)[:200]!r}")  # services repeat what they were sent
        if reward is None:
            raise VerifierError(f"{said}, not a finite number or an object of them (of float32)")
        if isinstance(reward, dict) and self._keys and self._keys.isdisjoint(reward):
            raise VerifierError(f"{said}, without {' or '.join(sorted(self._keys))}, which --reward-key names")
        return reward
