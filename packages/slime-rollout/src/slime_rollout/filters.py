"""Which scored groups are trained on: dynamic sampling, as in DAPO (Yu et al. 2025, section 3.2)."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import statistics
import threading
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.types import Drop, Group, Keep, Verdict
from slime_core.types.checks import scalar
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.generate import by_trajectory
from slime_rollout.threads import await_within

FLAG = "--dynamic-sampling-filter-path"
REJECTED = "rejected"
"""Drop reason for groups whose filter returns ``False``."""


def check_reward_nonzero_std(args: HookArgs, group: Group) -> Verdict:
    """Keep a group whose rewards differ: from equal ones, group-relative advantages are all 0.

    The samples of one trajectory count once, with the mean of their rewards; ``args.reward_key`` is the entry of a
    reward that counts. Another group is dropped as ``zero_std_<reward>``, with the reward that all have.
    """
    rewards = [
        statistics.fmean(sample.scalar_reward(args.reward_key) for sample in parts)
        for parts in by_trajectory(group).values()
    ]
    if max(rewards) - min(rewards) > 1e-6:
        return Keep()
    return Drop(f"zero_std_{round(rewards[0], 2):g}")


def check_reward_nonzero_std_with_fallback(args: HookArgs, group: Group) -> Verdict:
    """As :func:`check_reward_nonzero_std`, but a group is kept if the rollout could not be filled without another one.

    With ``--over-sampling-batch-size`` groups of equal rewards give way to those in flight; none is generated for them.
    """
    verdict = check_reward_nonzero_std(args, group)
    return verdict if isinstance(verdict, Keep) else dataclasses.replace(verdict, keep_when_insufficient=True)


class CustomFilter:
    """A custom function ``(args, group)`` that decides whether a group is trained on; a `ConfigError` if it is none."""

    def __init__(self, path: str, hook_args: HookArgs, *, time_limit: float) -> None:
        self._name, self._args, self._limit = f"{FLAG} {path}", hook_args, time_limit
        self._function = load_function(path, FLAG, arguments=("args", "group"))
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"{self._name} is async; it decides about scored groups at once: write a plain function")
        self._turn = asyncio.Lock()
        self._call = threading.Lock()

    def __call__(self, group: Group) -> Verdict:
        """The function's verdict. Raises `DataError` if it raised, or returned something else."""
        try:
            verdict: Any = self._function(self._args, group)
        except (Exception, SystemExit) as error:
            number = group[0].group_index
            raise DataError(f"{self._name} raised {type(error).__name__} for group {number}: {error}") from error
        if isinstance(verdict, Keep | Drop):
            return verdict
        # Functions written for other systems return an object with `keep`. Truth values may be NumPy's and torch's.
        keep = scalar(getattr(verdict, "keep", verdict))
        if isinstance(keep, bool):
            if keep:
                return Keep()
            is_kept = bool(getattr(verdict, "keep_when_insufficient", False))
            return Drop(getattr(verdict, "reason", None) or REJECTED, keep_when_insufficient=is_kept)
        raise DataError(f"{self._name} returned {verdict!r}; return Keep(), Drop('reason'), True or False")

    async def judge(self, group: Group) -> Verdict:
        """The verdict, computed off the event loop, within the time limit and never two at once: it may keep counts.

        A call that is cancelled runs on; the next one waits for its end within its own time limit.
        """
        is_left = threading.Event()

        def call() -> Verdict | None:
            with self._call:
                return None if is_left.is_set() else self(group)

        async with self._turn:  # the time limit begins with the turn
            try:
                what = f"{self._name} for group {group[0].group_index}"
                verdict: Verdict = await await_within(self._limit, what, call)
            finally:
                is_left.set()
        return verdict


def make_filter(config: RolloutConfig, hook_args: HookArgs) -> CustomFilter | None:
    """The filter of ``--dynamic-sampling-filter-path``; ``None`` without it."""
    path = config.selection.dynamic_sampling_filter_path
    return None if path is None else CustomFilter(path, hook_args, time_limit=config.selection.hook_timeout)
