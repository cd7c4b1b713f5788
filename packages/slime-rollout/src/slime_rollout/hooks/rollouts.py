"""User-defined functions around a rollout: on finished samples, on its groups, and in place of its metrics."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.types import Group, Sample, Status
from slime_core.types.checks import scalar
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.threads import await_within, blaming, call_within

SAMPLE_FLAG = "--rollout-sample-hook-path"
FILTER_FLAG = "--rollout-sample-filter-path"
ALL_FLAG = "--rollout-all-samples-process-path"
LOG_FLAG = "--custom-rollout-log-function-path"
EVAL_LOG_FLAG = "--custom-eval-rollout-log-function-path"
REWARDS_FLAG = "--custom-reward-post-process-path"
HOOKED = "rollout_sample_hooks"
"""Entry of the metadata of a sample that the sample hooks have seen: one that is given back is not shown again."""

Metrics = dict[str, float]
GetSamples = Callable[[int], list[Group]]


class UserFunction:
    """A plain function that is called within ``--hook-timeout`` seconds, in a thread of its own.

    Raises:
        ConfigError: It cannot be loaded, does not take the arguments, or is ``async``.
    """

    def __init__(self, path: str, flag: str, arguments: Sequence[str], limit: float) -> None:
        self.name, self._limit = f"{flag} {path}", limit
        self._function = load_function(path, flag, arguments=arguments)
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"{self.name} is async, and nothing goes on while it runs; write a plain function")

    def __call__(self, *given: Any) -> Any:
        """Its value. Raises `DataError` if it raised, `HookTimeoutError` if it took too long."""
        return call_within(self._limit, self.name, self.blamed, *given)

    async def within(self, *given: Any) -> Any:
        """The same without blocking the event loop."""
        return await await_within(self._limit, self.name, self.blamed, *given)

    def blamed(self, *given: Any) -> Any:
        """Its value, in this thread; what it raises becomes a `DataError` that names it."""
        with blaming(self.name):
            return self._function(*given)


class SampleHooks:
    """The functions of ``--rollout-sample-hook-path``: ``(args, sample, rollout_id=…, evaluation=…)``, async or not.

    Each sample passes through them in order when its generation is finished, before it is scored. They change it, or
    return another one with the same numbers. ``rollout_id`` is that of the rollout that is waited for.

    Raises:
        ConfigError: One cannot be loaded, or does not take the arguments.
    """

    def __init__(self, config: RolloutConfig, args: HookArgs) -> None:
        self._limit = config.selection.hook_timeout
        self._functions = [self._find(path, args) for path in config.hooks.rollout_sample_hook_path]
        self.rollout_id = 0

    def _find(self, path: str, args: HookArgs) -> tuple[str, Callable[..., Any], frozenset[str]]:
        function = load_function(path, SAMPLE_FLAG)
        signature, name = inspect.signature(function), f"{SAMPLE_FLAG} {path}"
        takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        names = frozenset(key for key in ("rollout_id", "evaluation") if takes_all or key in signature.parameters)
        try:
            signature.bind("args", "sample", **dict.fromkeys(names))
        except TypeError:
            raise ConfigError(
                f"{name} takes {signature}; it is called as (args, sample, rollout_id=…, evaluation=…), without those "
                "of the last two that it does not name"
            ) from None
        return name, functools.partial(function, args), names

    async def __call__(self, sample: Sample, *, evaluation: bool) -> Sample:
        """The sample after all functions; a `DataError` if one raised or returned something else."""
        if HOOKED in sample.metadata:
            return sample
        more = {"rollout_id": self.rollout_id, "evaluation": evaluation}
        for name, function, names in self._functions:
            call = functools.partial(function, sample, **{key: more[key] for key in names})
            sample = self._checked(name, sample, await self._call(name, sample, call))
        if self._functions:
            sample.metadata[HOOKED] = True
        return sample

    async def _call(self, name: str, sample: Sample, call: Callable[[], Any]) -> Any:
        what = f"{name} for sample {sample.index}"
        with blaming(what):
            try:
                found = await await_within(self._limit, what, call)
                if inspect.isawaitable(found):
                    async with asyncio.timeout(self._limit):
                        found = await found
                return found
            except TimeoutError:
                raise DataError(f"{what} took more than {self._limit:g} s; raise --hook-timeout") from None

    def _checked(self, name: str, sample: Sample, found: Any) -> Sample:
        result = sample if found is None else found
        if not isinstance(result, Sample) or (result.index, result.group_index) != (sample.index, sample.group_index):
            raise DataError(f"{name} returned {str(found)[:100]!r} for sample {sample.index}; return it, or nothing")
        result.validate()
        return result


class RolloutHooks:
    """The functions that see a whole rollout or evaluation; those that are not given do nothing.

    Raises:
        ConfigError: One cannot be loaded, or does not take its arguments.
    """

    def __init__(self, config: RolloutConfig, args: HookArgs) -> None:
        given, limit = config.hooks, config.selection.hook_timeout
        self._args = args

        def find(path: str | None, flag: str, *arguments: str) -> UserFunction | None:
            return None if path is None else UserFunction(path, flag, arguments, limit)

        self._filter = find(given.rollout_sample_filter_path, FILTER_FLAG, "args", "groups")
        self._all = find(given.rollout_all_samples_process_path, ALL_FLAG, "args", "all_groups", "get_samples")
        self._log = find(
            given.custom_rollout_log_function_path,
            LOG_FLAG,
            *("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
        )
        self._log_eval = find(
            given.custom_eval_rollout_log_function_path, EVAL_LOG_FLAG, "rollout_id", "args", "data", "extra_metrics"
        )

    def see_groups(self, groups: list[Group], dropped: list[Group], get_samples: GetSamples) -> None:
        """Let the filter mark samples of ``groups`` with ``remove_sample``, then show these and the dropped ones."""
        for function, given in ((self._filter, (groups,)), (self._all, ([*groups, *dropped], get_samples))):
            if function is None:
                continue
            if (found := function(self._args, *given)) is not None:
                raise DataError(
                    f"{function.name} returned a {type(found).__name__}, which nothing would use; change the samples "
                    "(sample.remove_sample = True) and return nothing"
                )
        for sample in (sample for group in groups for sample in group):
            sample.validate()

    def log(self, rollout_id: int, samples: list[Sample], usual: Metrics, extra: Metrics, seconds: float) -> Metrics:
        """The metrics of a rollout: ``usual`` and ``extra``, which the function may change; true leaves out usual."""
        if self._log is None:
            return usual | extra
        skips = self._log(rollout_id, self._args, samples, extra, seconds)
        return _logged(self._log, skips, usual, extra)

    async def log_eval(self, rollout_id: int, samples: dict[str, list[Sample]], usual: Metrics, key: Any) -> Metrics:
        """The same of an evaluation; ``key(name)`` is a set's reward key."""
        if self._log_eval is None:
            return usual
        extra: Metrics = {}
        data = {
            name: {
                "rewards": [None if one.reward is None else one.scalar_reward(key(name)) for one in found],
                "truncated": [one.status is Status.TRUNCATED for one in found],
                "samples": found,
            }
            for name, found in samples.items()
        }
        return _logged(self._log_eval, await self._log_eval.within(rollout_id, self._args, data, extra), usual, extra)


def _logged(function: UserFunction, skips: Any, usual: Metrics, extra: Metrics) -> Metrics:
    skips = scalar(skips)
    if skips not in (None, True, False):
        raise DataError(f"{function.name} returned {str(skips)[:100]!r}; return True to leave out the usual metrics")
    return ({} if skips else usual) | plain_metrics(extra, f"{function.name} set")


def plain_metrics(given: Mapping[Any, Any], who: str) -> Metrics:
    """A user-defined function's metrics as floats; those of NumPy and torch are numbers, and so are truth values."""
    values = {str(name): scalar(value) for name, value in given.items()}
    if wrong := [name for name, value in values.items() if not isinstance(value, int | float)]:
        raise DataError(f"{who} the metric {wrong[0]} to {str(values[wrong[0]])[:100]!r}; give numbers")
    return {name: float(value) for name, value in values.items()}


class RewardPostProcess:
    """The function of ``--custom-reward-post-process-path``, ``(args, samples)`` → ``(raw rewards, rewards)``.

    Its rewards replace what the estimator would make of them: nothing is subtracted or divided afterwards.

    Raises:
        ConfigError: It cannot be loaded, or does not take the arguments.
    """

    def __init__(self, config: RolloutConfig, args: HookArgs) -> None:
        path = str(config.hooks.custom_reward_post_process_path)
        self._function = UserFunction(path, REWARDS_FLAG, ("args", "samples"), config.selection.hook_timeout)
        self._args = args

    def __call__(self, samples: list[Sample]) -> tuple[list[float], list[float]]:
        """Two numbers for each sample; a `DataError` if the function returned something else."""
        found = self._function(self._args, samples)
        pair = found if isinstance(found, list | tuple) else scalar(found)
        lists = [_numbers(part) for part in pair] if isinstance(pair, list | tuple) and len(pair) == 2 else []
        right = [isinstance(part, list | tuple) and len(part) == len(samples) for part in lists]
        if len(right) != 2 or not all(right) or not all(_is_number(value) for part in lists for value in part):
            raise DataError(
                f"{self._function.name} returned {str(found)[:100]}; return two lists of {len(samples)} finite numbers "
                "each: the rewards as given, and those to train on"
            )
        raw, rewards = ([float(value) for value in part] for part in lists)
        return raw, rewards


def _numbers(part: Any) -> Any:
    """A list of plain values of what a function gave for each sample."""
    is_array = hasattr(part, "ndim") and part.ndim > 0
    return [scalar(value) for value in part] if isinstance(part, list | tuple) or is_array else part


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
