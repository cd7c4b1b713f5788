"""Which scored groups are trained on: dynamic sampling, as in DAPO (Yu et al. 2025, section 3.2)."""

from __future__ import annotations

import inspect
import statistics
import threading
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupFilter
from slime_core.types import Drop, Group, Keep, Verdict
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.generate import by_trajectory
from slime_rollout.threads import await_within

FLAG = "--dynamic-sampling-filter-path"
REJECTED = "rejected"
"""Drop reason for groups whose filter returns ``False``."""


def check_reward_nonzero_std(args: HookArgs, group: Group) -> Verdict:
    """Keep a group whose rewards differ: from equal ones, group-relative advantages are all 0.

    The samples of one trajectory count once, with the mean of their rewards.

    Args:
        args: Every flag by its name; ``args.reward_key`` says which entry of a reward given by name counts.
        group: A scored group.

    Returns:
        ``Keep()``, or ``Drop("zero_std_<reward>")`` with the reward that all have.
    """
    rewards = [
        statistics.fmean(sample.scalar_reward(args.reward_key) for sample in parts)
        for parts in by_trajectory(group).values()
    ]
    if max(rewards) - min(rewards) > 1e-6:
        return Keep()
    return Drop(f"zero_std_{round(rewards[0], 2):g}")


class CustomFilter:
    """A custom function ``(args, group)`` that says which groups to keep.

    Raises:
        ConfigError: It cannot be loaded, does not take ``(args, group)``, or is ``async``.
    """

    def __init__(self, path: str, hook_args: HookArgs) -> None:
        self._function = load_function(path, FLAG, arguments=("args", "group"))
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"{FLAG} {path} is async; it decides about scored groups at once: write a plain function")
        self._path = path
        self._args = hook_args

    def __call__(self, group: Group) -> Verdict:
        """The function's verdict. Raises `DataError` if it raised, or returned something else."""
        where = f"{FLAG} {self._path}"
        try:
            verdict: Any = self._function(self._args, group)
        except (Exception, SystemExit) as error:
            number = group[0].group_index
            raise DataError(f"{where} raised {type(error).__name__} for group {number}: {error}") from error
        if isinstance(verdict, Keep | Drop):
            return verdict
        if isinstance(getattr(verdict, "keep", None), bool):  # as functions written for other systems return it
            return Keep() if verdict.keep else Drop(getattr(verdict, "reason", None) or REJECTED)
        if isinstance(verdict, bool) or type(verdict).__name__ == "bool":  # NumPy's and torch's, too
            return Keep() if verdict else Drop(REJECTED)
        raise DataError(f"{where} returned {verdict!r}; return Keep(), Drop('reason'), True or False")


class FilterCalls:
    """Calls a filter off the event loop, within ``--hook-timeout`` and never twice at once: it may keep counts.

    A call that was cancelled, such as that of a group which a complete rollout did not need, cannot be stopped: the
    next one, also of another event loop, waits for its end within its own time limit.
    """

    def __init__(self, keep: GroupFilter, config: RolloutConfig) -> None:
        self._keep, self._limit = keep, config.selection.hook_timeout
        self._name = f"{FLAG} {config.selection.dynamic_sampling_filter_path}"
        self._turn = threading.Lock()

    async def __call__(self, group: Group) -> Verdict:
        """The filter's verdict. Raises `HookTimeoutError` if it took too long."""
        is_left = threading.Event()

        def judge() -> Verdict | None:
            with self._turn:
                return None if is_left.is_set() else self._keep(group)

        what = f"{self._name} for group {group[0].group_index}"
        try:
            verdict: Verdict = await await_within(self._limit, what, judge)
        finally:
            is_left.set()
        return verdict


def make_filter(config: RolloutConfig, hook_args: HookArgs) -> GroupFilter | None:
    """The filter of ``--dynamic-sampling-filter-path``; ``None`` without it."""
    path = config.selection.dynamic_sampling_filter_path
    return None if path is None else CustomFilter(path, hook_args)
