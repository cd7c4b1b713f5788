"""Scoring by rules: each sample by the one that its row names, or else by the run's."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable

from slime_core.errors import DataError
from slime_core.interfaces import Reward, RewardValue
from slime_core.types import Sample
from slime_rollout.config import REMOTE_RULES, RolloutConfig
from slime_rollout.rewards.pool import VerifierPool
from slime_rollout.rewards.registry import BOXED, Rule, find_rule, rule_of_row
from slime_rollout.rewards.remote import RemoteReward
from slime_rollout.rewards.tolerant import WITH_A_SERVICE, Tolerance, Tolerant


class RuleReward:
    """A rule that compares the response with the label.

    Args:
        rule: Gives the reward.
        pool: Where it runs; ``None`` for one that is instant, which then runs on the event loop.
    """

    def __init__(self, rule: Rule, pool: VerifierPool | None = None) -> None:
        self._rule = rule
        self._pool = pool

    async def __call__(self, sample: Sample) -> RewardValue:
        """The rule's value.

        Raises:
            DataError: The sample has no label.
            VerifierError: The rule gave no value.
            RewardError: The pool's processes cannot be started.
        """
        if sample.label is None:
            raise DataError(f"sample {sample.index} has no label to compare its response with")
        metadata = {key: sample.metadata[key] for key in self._rule.metadata_keys if key in sample.metadata}
        if self._pool is None:
            return self._rule.score(sample.response, sample.label, metadata)
        return await self._pool.score(sample.response, sample.label, metadata)


class RandomReward:
    """0 or 1 with equal chance, the same for the same sample and response: a baseline that must teach nothing."""

    async def __call__(self, sample: Sample) -> float:
        """One bit of a hash."""
        text = f"{sample.index}:{sample.response}".encode(errors="replace")
        return float(hashlib.blake2b(text, digest_size=1).digest()[0] & 1)


class RuleRewards:
    """The rewards of rules, each made when it is first needed, and once: they hold processes and connections."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str | None], Reward] = {}
        self._lock = threading.Lock()

    def of(self, name: str, config: RolloutConfig, names: Iterable[str] = ()) -> Reward:
        """What scores by a rule.

        Args:
            name: The rule's.
            config: Limits, and the address of the service.
            names: Of a service's rewards, as for `Tolerance`.
        """
        key = name, config.rm_url if name in REMOTE_RULES else None
        with self._lock:
            if key not in self._made:
                self._made[key] = _make(name, config, names)
            return self._made[key]


class RowRuleReward:
    """Scores each sample by the rule that its row's metadata names as ``rm_type``, or else by the run's.

    Args:
        config: The run's rule, limits, and the address of the service.
        rewards: The rules' rewards.
        names: As for :meth:`RuleRewards.of`.
    """

    def __init__(self, config: RolloutConfig, rewards: RuleRewards, names: Iterable[str] = ()) -> None:
        self._config, self._rewards, self._names = config, rewards, tuple(names)
        self._rule = config.rule or ""

    async def __call__(self, sample: Sample) -> RewardValue:
        """The rule's value.

        Raises:
            DataError: There is no rule of that name; or the sample lacks the label, or the run the service, that the
                rule needs.
            RewardError: The rule's processes cannot be started, the service refused the request, or it has scored
                nothing for half an hour.
        """
        try:
            rule = rule_of_row(sample.metadata, self._rule)
        except DataError as error:
            raise DataError(f"sample {sample.index}: {error}") from None
        if rule in REMOTE_RULES and self._rule not in REMOTE_RULES:
            raise DataError(f"sample {sample.index}: its rule {rule} needs --rm-type remote_rm with --rm-url")
        return await self._rewards.of(rule, self._config, self._names)(sample)


def _make(name: str, config: RolloutConfig, names: Iterable[str]) -> Reward:
    if name == "random":
        return RandomReward()
    drop, timeout = config.rm_on_failure == "drop", config.timeout_of_rule(name)
    if name in REMOTE_RULES:
        remote = RemoteReward(config.rm_url or "", timeout=timeout, boxed=name.startswith(BOXED))
        service = f"the service of --rm-url {config.rm_url}"
        return Tolerant(remote, Tolerance(names=names, drop=drop, name=service, patience=WITH_A_SERVICE))
    rule = find_rule(name)
    if rule.instant:
        return RuleReward(rule)
    pool = VerifierPool(
        name,
        workers=config.rm_workers,
        time_limit=timeout,
        memory_limit=int(config.rm_memory_limit * 2**30),
    )
    return Tolerant(RuleReward(rule, pool), Tolerance(rule.wrong, drop=drop))
