"""Reward functions of the user's: found by path, checked before the run, kept off the event loop."""

from __future__ import annotations

import math
from typing import Any

from slime_core.hooks import HookArgs
from slime_core.interfaces import RewardValue
from slime_core.types import Sample
from slime_core.user_functions import load_function
from slime_rollout.errors import VerifierError
from slime_rollout.rewards.calls import FunctionCalls
from slime_rollout.rewards.lent import lent
from slime_rollout.rewards.tolerant import name_samples

FLAG = "--custom-rm-path"
USUAL_NAMES = ("custom_rm", "CustomRewardModel")


class CustomReward:
    """A function ``(args, sample) -> float | dict[str, float]``, plain or ``async``.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn``, ``file.py:fn``, or ``file.py`` with a function ``custom_rm``.
        hook_args: Every flag by its name, the function's first argument.
        timeout: Time limit of one call, in seconds.

    Raises:
        ConfigError: There is no such function, or it does not take two arguments.
    """

    def __init__(self, path: str, hook_args: HookArgs, *, timeout: float) -> None:
        self._path = path
        function = load_function(path, FLAG, arguments=("args", "sample"), usual_names=USUAL_NAMES)
        self._calls = FunctionCalls(f"{FLAG} {path}", function, timeout=timeout)
        self._args = hook_args

    async def __call__(self, sample: Sample) -> RewardValue:
        """The function's value for a sample.

        Raises:
            VerifierError: It raised, took too long, or returned no number.
            RewardError: Too many calls of it go on without end.
        """
        with lent([sample]) as (given,):
            value = await self._calls(name_samples([sample]), self._args, given)
        return checked_reward(value, self._path, sample)


def checked_reward(value: Any, path: str, sample: Sample) -> RewardValue:
    """What a user's function returned for a sample, as a number or numbers by name.

    Raises:
        VerifierError: It is neither.
    """
    entries = value if isinstance(value, dict) else {"": value}
    if not entries or not all(_is_number(entry) for entry in entries.values()):
        raise VerifierError(
            f"{FLAG} {path} returned {_shown(value)} for sample {sample.index}; "
            "return a finite number, or a dictionary of them by name"
        )
    if isinstance(value, dict):
        return {str(key): float(entry) for key, entry in value.items()}
    return float(value)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(float(value))
    except Exception:  # of a class of the user's, whatever it raises
        return False


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
