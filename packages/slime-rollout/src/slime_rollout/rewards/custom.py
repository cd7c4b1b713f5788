"""Reward functions of the user's: found by path, checked before the run, kept off the event loop."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any
from weakref import WeakKeyDictionary

from slime_core.hooks import HookArgs
from slime_core.interfaces import RewardValue
from slime_core.types import Sample
from slime_core.user_functions import load_function
from slime_rollout.errors import RewardError
from slime_rollout.rewards.threads import in_thread

FLAG = "--custom-rm-path"
USUAL_NAMES = ("custom_rm", "CustomRewardModel")
_CALLS = 32  # at once: enough for functions that wait, few enough that those that compute end within their limit


class CustomReward:
    """A function ``(args, sample) -> float | dict[str, float]``, plain or ``async``.

    A plain function runs in a thread of its own, so that a slow one delays no generation. One that passes the time
    limit ends the run: its thread cannot be stopped, so it is left behind, and does not keep the process alive.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn``, ``file.py:fn``, or ``file.py`` with a function ``custom_rm``.
        hook_args: Every flag by its name, the function's first argument.
        timeout: Time limit of one call, in seconds.

    Raises:
        ConfigError: There is no such function, or it does not take two arguments.
    """

    def __init__(self, path: str, hook_args: HookArgs, *, timeout: float) -> None:
        self._path = path
        self._function = load_function(path, FLAG, arguments=("args", "sample"), usual_names=USUAL_NAMES)
        self._args = hook_args
        self._timeout = timeout
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, sample: Sample) -> RewardValue:
        """The function's value for a sample.

        Raises:
            RewardError: It raised, took too long, or returned no number.
        """
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_CALLS))
        try:
            async with slots, asyncio.timeout(self._timeout):
                value = await self._call(sample)
        except TimeoutError:
            raise RewardError(
                f"{FLAG} {self._path} took more than {self._timeout:g} s for sample {sample.index}; "
                "make it faster or raise --rm-timeout"
            ) from None
        return checked_reward(value, self._path, sample)

    async def _call(self, sample: Sample) -> Any:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(self._args, sample)
            value = await in_thread(self._function, self._args, sample)
            return await value if inspect.isawaitable(value) else value
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"{FLAG} {self._path} raised {type(error).__name__} for sample {sample.index}: {error}"
            ) from error


def checked_reward(value: Any, path: str, sample: Sample) -> RewardValue:
    """What a user's function returned for a sample, as a number or numbers by name.

    Raises:
        RewardError: It is neither.
    """
    entries = value if isinstance(value, dict) else {"": value}
    if not entries or not all(_is_number(entry) for entry in entries.values()):
        raise RewardError(
            f"{FLAG} {path} returned {value!r} for sample {sample.index}; "
            "return a finite number, or a dictionary of them by name"
        )
    if isinstance(value, dict):
        return {str(key): float(entry) for key, entry in value.items()}
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
