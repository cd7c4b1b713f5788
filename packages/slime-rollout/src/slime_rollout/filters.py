"""Which scored groups are trained on: dynamic sampling, as in DAPO (Yu et al. 2025, section 3.2)."""

from __future__ import annotations

import inspect
import statistics
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupFilter
from slime_core.types import Drop, Group, Keep, Verdict
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.generate import by_trajectory

FLAG = "--dynamic-sampling-filter-path"
REJECTED = "rejected"
"""What a group is counted under whose filter says no more than ``False``."""


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


class OwnFilter:
    """A function ``(args, group)`` that says which groups to keep. Implements `slime_core.interfaces.GroupFilter`.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn`` or ``file.py:fn``.
        hook_args: Every flag by its name, the function's first argument.

    Raises:
        ConfigError: There is no such function, it does not take ``(args, group)``, or it is ``async``.
    """

    def __init__(self, path: str, hook_args: HookArgs) -> None:
        self._function = load_function(path, FLAG, arguments=("args", "group"))
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"{FLAG} {path} is async; it decides about scored groups at once: write a plain function")
        self._path = path
        self._args = hook_args

    def __call__(self, group: Group) -> Verdict:
        """The function's verdict.

        Raises:
            DataError: It raised, or returned neither ``Keep()``, ``Drop(reason)`` nor a truth value.
        """
        where = f"{FLAG} {self._path}"
        try:
            verdict: Any = self._function(self._args, group)
        except (Exception, SystemExit) as error:
            number = group[0].group_index
            raise DataError(f"{where} raised {type(error).__name__} for group {number}: {error}") from error
        if isinstance(verdict, Keep | Drop):
            return verdict
        if isinstance(verdict, bool) or type(verdict).__name__ == "bool":  # NumPy's and torch's, too
            return Keep() if verdict else Drop(REJECTED)
        raise DataError(f"{where} returned {verdict!r}; return Keep(), Drop('reason'), True or False")


def make_filter(config: RolloutConfig, hook_args: HookArgs) -> GroupFilter | None:
    """What ``--dynamic-sampling-filter-path`` names; ``None`` without it.

    Raises:
        ConfigError: As `OwnFilter`.
    """
    path = config.dynamic_sampling_filter_path
    return None if path is None else OwnFilter(path, hook_args)
