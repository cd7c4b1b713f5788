"""Reward functions of the user's that score several samples in one call, and classes with ``compute_reward``."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.interfaces import RewardValue
from slime_core.types import Group, Sample
from slime_core.user_functions import load_function
from slime_rollout.errors import RewardError
from slime_rollout.rewards.custom import FLAG, USUAL_NAMES, checked_reward
from slime_rollout.rewards.threads import in_thread

_BATCH = 64  # samples

Batched = Callable[[list[Sample]], Any]
"""Takes samples, gives their rewards, or something to await for them. Runs in a thread unless it is ``async``."""


def load_batched(
    path: str, hook_args: HookArgs, *, kwargs: Mapping[str, Any] | None, always: bool = False
) -> Batched | None:
    """A function ``(args, samples)``, or a class whose ``compute_reward(prompts, responses)`` scores.

    The constructor's arguments are checked here; the object is made, once, in the first call, within its time limit.

    Args:
        path: As a flag gives it; ``file.py`` alone means its ``custom_rm``, or else its ``CustomRewardModel``.
        hook_args: Every flag by its name, a function's first argument.
        kwargs: The constructor's arguments; ``None`` if none were given.
        always: Take every function for a batched one, whatever its second argument is called.

    Returns:
        ``None`` for a function whose second argument is not called ``samples``.

    Raises:
        ConfigError: It cannot be loaded, or does not take the arguments.
    """
    found = load_function(path, FLAG, usual_names=USUAL_NAMES)
    if inspect.isclass(found):
        return _of_class(found, path, dict(kwargs or {}))
    if kwargs is not None:
        raise ConfigError(
            f"--custom-rm-kwargs is for a class; {FLAG} {path} is a function, which gets every flag in args"
        )
    parameters = list(inspect.signature(found).parameters)
    if not always and parameters[1:2] != ["samples"]:
        return None
    load_function(path, FLAG, arguments=("args", "samples"), usual_names=USUAL_NAMES)
    if inspect.iscoroutinefunction(found):

        async def batched(samples: list[Sample]) -> Any:
            return await found(hook_args, samples)

        return batched
    return lambda samples: found(hook_args, samples)


def _of_class(made_from: type[Any], path: str, kwargs: dict[str, Any]) -> Batched:
    try:
        inspect.signature(made_from).bind(**kwargs)
        inspect.signature(made_from.compute_reward).bind(None, "prompts", "responses")
    except AttributeError:
        raise ConfigError(f"{FLAG} {path} is a class without compute_reward(self, prompts, responses)") from None
    except TypeError as error:
        raise ConfigError(
            f"{FLAG} {path}: {error}; it is made with --custom-rm-kwargs ({', '.join(kwargs) or 'none given'}), "
            "and called as compute_reward(prompts, responses)"
        ) from None
    made: list[Any] = []
    lock = threading.Lock()

    def batched(samples: list[Sample]) -> Any:
        with lock:
            if not made:
                made.append(made_from(**kwargs))
        return made[0].compute_reward([sample.prompt for sample in samples], [sample.response for sample in samples])

    return batched


class BatchedReward:
    """Scores samples in batches: those that wait while a call runs are scored by the next one, at most 64.

    Args:
        path: Where the function comes from, for messages.
        function: What scores.
        timeout: Time limit of one call, in seconds.
    """

    def __init__(self, path: str, function: Batched, *, timeout: float) -> None:
        self._path = path
        self._function = function
        self._timeout = timeout
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()

    async def __call__(self, sample: Sample) -> RewardValue:
        """The sample's reward.

        Raises:
            RewardError: The call of its batch raised, took too long, or did not return one reward for each sample.
        """
        queue = self._queues.setdefault(asyncio.get_running_loop(), _Queue())
        answer: asyncio.Future[RewardValue] = asyncio.get_running_loop().create_future()
        queue.waiting.append((sample, answer))
        async with queue.turn:
            await asyncio.sleep(0)  # whatever comes in the same moment joins
            while not answer.done():
                await self._score_next(queue)
        return await answer

    async def score_group(self, group: Group) -> list[RewardValue]:
        """The rewards of some samples, from one call.

        Raises:
            RewardError: As :meth:`__call__`.
        """
        try:
            async with asyncio.timeout(self._timeout):
                values = await self._call(group)
        except TimeoutError:
            raise RewardError(
                f"{FLAG} {self._path} took more than {self._timeout:g} s for {_name(group)}; "
                "make it faster or raise --rm-timeout"
            ) from None
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or len(values) != len(group):
            raise RewardError(
                f"{FLAG} {self._path} returned {str(values)[:200]} for {_name(group)}; "
                f"return a list of {len(group)} rewards"
            )
        return [checked_reward(value, self._path, sample) for value, sample in zip(values, group, strict=True)]

    async def _score_next(self, queue: _Queue) -> None:
        batch, queue.waiting = queue.waiting[:_BATCH], queue.waiting[_BATCH:]
        try:
            values = await self.score_group([sample for sample, _ in batch])
        except RewardError as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        except BaseException:  # cancelled: the others of the batch still wait
            queue.waiting[:0] = batch
            raise
        for (_, answer), value in zip(batch, values, strict=True):
            if not answer.done():
                answer.set_result(value)

    async def _call(self, group: Group) -> Any:
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(group)
            values = await in_thread(self._function, group)
            return await values if inspect.isawaitable(values) else values
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"{FLAG} {self._path} raised {type(error).__name__} for {_name(group)}: {error}"
            ) from error


class _Queue:
    """Of one event loop: the samples that wait, and whose turn it is to call."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Sample, asyncio.Future[RewardValue]]] = []
        self.turn = asyncio.Lock()


def _name(group: Group) -> str:
    first, last = group[0].index, group[-1].index
    return f"sample {first}" if len(group) == 1 else f"{len(group)} samples, {first} to {last}"
