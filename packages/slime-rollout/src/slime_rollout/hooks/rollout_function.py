"""User-defined functions that make a whole rollout, or a whole evaluation, in place of slime's own."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.metrics import eval_metrics, set_name_problem
from slime_core.types import EvalReport, Group, Sample, Status
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.data import AccountedSource, Fate, SourceCalls, copied_group
from slime_rollout.generate import by_trajectory, number_parts
from slime_rollout.hooks.rollouts import plain_metrics
from slime_rollout.limits import ModelLimits
from slime_rollout.threads import await_within, blaming

FLAG = "--rollout-function-path"
EVAL_FLAG = "--eval-function-path"
LIMIT_FLAG = "--custom-generate-timeout"
DONE = (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True)
class RolloutFnTrainOutput:
    """A value that a rollout function may return: groups of scored samples, and metrics of its own."""

    samples: list[Group]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutFnEvalOutput:
    """A value that an evaluation function may return: by set ``rewards``, and perhaps ``truncated`` and ``samples``."""

    data: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float] = field(default_factory=dict)


class LentSource:
    """The ``data_source`` of a rollout function, until its call is over: what it does later is an error of its own."""

    def __init__(self, calls: SourceCalls) -> None:
        self._calls, self._lock, self._is_over = calls, threading.Lock(), False

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next groups, which the function may change."""
        with self._lock:
            self._check()
            return [copied_group(group) for group in self._calls.get_samples(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        """Give groups back, to be handed out again; without their response if they have none of status completed."""
        with self._lock:
            self._check()
            for sample in (sample for group in samples for sample in group):
                sample.validate()
            self._calls.add_samples([copied_group(group) for group in samples])

    def end(self) -> None:
        """The call is over."""
        with self._lock:
            self._is_over = True

    def _check(self) -> None:
        if self._is_over:
            raise RuntimeError("this data source belongs to a call that is over; use the one of the present call")


class RolloutFunction:
    """The function of ``--rollout-function-path``: ``(args, rollout_id, data_source, evaluation=False)``, async or not.

    It returns ``rollout_batch_size`` groups of scored samples as a list, or an object with ``samples`` and ``metrics``
    (`RolloutFnTrainOutput`); with ``evaluation=True`` a mapping from names to ``rewards``, ``truncated`` and
    ``samples``, or an object with that as ``data``. Groups that it got and neither returns nor gives back count as
    filtered. Samples that it did not get in this call get new numbers. After an error the data source is as it was.

    Raises:
        ConfigError: It cannot be loaded, or does not take the arguments.
    """

    def __init__(self, path: str, flag: str, config: RolloutConfig, args: HookArgs) -> None:
        self.name, self._config, self._args = f"{flag} {path}", config, args
        self._limits = ModelLimits.of(config.data.hf_checkpoint)
        self._function = load_function(path, flag)
        signature = inspect.signature(self._function)
        try:
            signature.bind("args", 0, "data_source", evaluation=False)
        except TypeError:
            raise ConfigError(
                f"{self.name} takes {signature}; it is called as (args, rollout_id, data_source, evaluation=…)"
            ) from None

    async def collect(self, rollout_id: int, calls: SourceCalls) -> tuple[list[Group], dict[str, float]]:
        """The groups of a rollout, and the function's metrics.

        Raises `DataError` if it raised or returned something else, `HookTimeoutError` if it took too long.
        """
        calls.check()
        with calls.transaction():
            found = await self._call(rollout_id, LentSource(calls), evaluation=False)
            groups = self._groups(getattr(found, "samples", found))
            _settle(groups, calls.source)
        return groups, self._metrics(found)

    async def evaluate(self, rollout_id: int, calls: SourceCalls) -> EvalReport:
        """An evaluation; errors as of :meth:`collect`. It gets no training prompts."""
        start, source = time.perf_counter(), LentSource(calls)
        source.end()
        found = await self._call(rollout_id, source, evaluation=True)
        data = getattr(found, "data", found)
        if not isinstance(data, Mapping) or not data:
            raise DataError(f"{self.name} returned {_short(data)}; return a mapping from held-out set to rewards")
        metrics, samples, scores = self._metrics(found), {}, {}
        for name, one in data.items():
            rewards, own = self._eval_set(name, one)
            scores[name] = statistics.fmean(rewards)
            if own:
                samples[name] = own
                metrics |= eval_metrics(name, own, self._config.rewards.reward_key)
            if "truncated" in one:
                metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(map(bool, one["truncated"]))
            metrics[f"eval/{name}"] = scores[name]
        seconds = time.perf_counter() - start
        return EvalReport(rollout_id=rollout_id, scores=scores, metrics=metrics, samples=samples, seconds=seconds)

    async def _call(self, rollout_id: int, source: LentSource, *, evaluation: bool) -> Any:
        limit = self._config.sampling.custom_generate_timeout
        call = functools.partial(self._function, self._args, rollout_id, source, evaluation=evaluation)
        with blaming(self.name):
            try:
                async with asyncio.timeout(limit + 1):
                    found = await await_within(limit, self.name, call, flag=LIMIT_FLAG)
                    return await found if inspect.isawaitable(found) else found
            except TimeoutError:
                raise DataError(f"{self.name} was not done after {limit:g} s; raise {LIMIT_FLAG}") from None
            finally:
                source.end()

    def _groups(self, found: Any) -> list[Group]:
        """The groups that were returned, if they can be trained on."""
        size, key = self._config.selection.rollout_batch_size, self._config.rewards.reward_key
        if not _is_groups(found):
            raise DataError(f"{self.name} returned {_short(found)}; return a list of groups, each a list of samples")
        if len(found) != size:
            raise DataError(f"{self.name} returned {len(found)} groups; return --rollout-batch-size {size}")
        numbers = [{sample.group_index for sample in group} for group in found]
        if any(len(own) != 1 for own in numbers) or len(set.union(*numbers)) < size:
            raise DataError(f"{self.name}: the samples of a group need one group_index, and each group another")
        for sample in (sample for group in found for sample in group):
            where = f"{self.name}: sample {sample.index} of group {sample.group_index}"
            sample.validate()
            if sample.status not in DONE or sample.reward is None or not sample.tokens:
                raise DataError(f"{where} is not ready: set tokens, response_length, reward, and status completed")
            if not math.isfinite(sample.scalar_reward(key)):
                raise DataError(f"{where} has the reward {sample.reward}; set a finite number")
            if not all(map(math.isfinite, sample.rollout_log_probs or ())):
                raise DataError(f"{where} has rollout_log_probs that are not finite")
            if problem := self._limits.token_problem(sample.tokens) or self._limits.length_problem(len(sample.tokens)):
                raise DataError(f"{where} is not of this model: {problem}")
        return [list(group) for group in found]

    def _metrics(self, found: Any) -> dict[str, float]:
        return plain_metrics(getattr(found, "metrics", None) or {}, f"{self.name} set")

    def _eval_set(self, name: Any, one: Any) -> tuple[list[float], list[Sample]]:
        if not isinstance(name, str) or (problem := set_name_problem(name)):
            raise DataError(f"{self.name} returned a held-out set called {name!r}, which {problem or 'is no text'}")
        try:
            rewards = [float(value) for value in one["rewards"]]
            samples = list(one.get("samples") or [])
        except (TypeError, ValueError, KeyError, AttributeError):
            rewards, samples = [], []
        if not rewards or not all(map(math.isfinite, rewards)):
            raise DataError(f"{self.name}: held-out set {name} is {_short(one)}; return finite numbers as its rewards")
        if not all(isinstance(sample, Sample) for sample in samples):
            raise DataError(f"{self.name}: samples of held-out set {name} must be a list of samples")
        return rewards, samples


def find_functions(config: RolloutConfig, args: HookArgs) -> tuple[RolloutFunction | None, RolloutFunction | None]:
    """The user's functions for rollouts and for evaluations; ``None`` where slime makes them."""
    path, eval_path = config.rollout_function, config.eval_function
    flag = FLAG if config.sampling.eval_function_path is None else EVAL_FLAG
    return (
        None if path is None else RolloutFunction(path, FLAG, config, args),
        None if eval_path is None else RolloutFunction(eval_path, flag, config, args),
    )


def _settle(groups: list[Group], source: AccountedSource) -> None:
    """Account for every sample: what is returned was trained on, and what is out still was filtered."""
    ledger = source.ledger
    out = {sample.trajectory for group in ledger.out_groups() for sample in group}
    for group in groups:
        fresh = [sample for sample in group if sample.trajectory not in out]  # not of this source: it numbers them
        for parts in by_trajectory(fresh).values():
            for sample in parts:
                sample.index = source.fresh_index()
            for sample in parts:
                sample.trajectory_id = parts[0].index if parts[1:] else None
        ledger.hand_out([fresh] if fresh else [])
    number_parts(groups, source.fresh_index)
    ledger.settle(groups, Fate.TRAINED)
    ledger.settle(ledger.out_groups(), Fate.FILTERED)


def _is_groups(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(
        isinstance(group, list | tuple) and group and all(isinstance(sample, Sample) for sample in group)
        for group in found
    )


def _short(value: Any) -> str:
    return repr(value)[:100]
