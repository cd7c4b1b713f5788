"""Reward functions of the user's that score several samples in one call, and classes with ``compute_reward``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, RewardValue
from slime_core.types import Group, Sample
from slime_core.user_functions import load_function
from slime_rollout.errors import RewardError, VerifierError
from slime_rollout.event_loop import PerLoop
from slime_rollout.rewards.calls import FunctionCalls
from slime_rollout.rewards.custom import FLAG, USUAL_NAMES, checked_reward
from slime_rollout.rewards.lent import lent
from slime_rollout.rewards.tolerant import Outcome, name_samples

_BATCH = 64  # samples

Batched = Callable[[list[Sample]], Any]
"""Takes samples, gives their rewards, or something to await for them."""


def load_batched(
    path: str, hook_args: HookArgs, *, kwargs: Mapping[str, Any] | None, always: bool = False
) -> Batched | None:
    """A function ``(args, samples)``, or a class whose ``compute_reward(prompts, responses)`` scores.

    The constructor's arguments are checked here; the object is made, once, in the first call, within its time limit.

    Args:
        path: As a flag gives it; ``file.py`` alone means its ``custom_rm``, or else its ``CustomRewardModel``.
        hook_args: Every flag by its name, a function's first argument.
        kwargs: The constructor's arguments; ``None`` if none were given. A ``model_path`` that it needs and that is not
            among them is ``--hf-checkpoint``.
        always: Take every function for a batched one, whatever its second argument is called.

    Returns:
        ``None`` for a function whose second argument is not called ``samples``.

    Raises:
        ConfigError: It cannot be loaded, or does not take the arguments.
    """
    found = load_function(path, FLAG, usual_names=USUAL_NAMES)
    if inspect.isclass(found):
        return _Model(found, path, dict(kwargs or {}), _model_path(found, hook_args))
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


def _model_path(made_from: Any, hook_args: HookArgs) -> dict[str, Any]:
    """The run's model, for a constructor that needs a ``model_path``."""
    wanted = inspect.signature(made_from).parameters.get("model_path")
    if wanted is None or wanted.default is not wanted.empty or "hf_checkpoint" not in hook_args:
        return {}
    return {"model_path": hook_args.hf_checkpoint}


class _Model:
    """An object of the user's class, made in the first call.

    Raises:
        ConfigError: The class has no ``compute_reward``, or takes other arguments.
    """

    def __init__(self, made_from: Any, path: str, kwargs: dict[str, Any], defaults: dict[str, Any]) -> None:
        try:
            inspect.signature(made_from).bind(**defaults | kwargs)
            inspect.signature(made_from.compute_reward).bind(None, "prompts", "responses")
        except AttributeError:
            raise ConfigError(f"{FLAG} {path} is a class without compute_reward(self, prompts, responses)") from None
        except TypeError as error:
            raise ConfigError(
                f"{FLAG} {path}: {error}; it is made with --custom-rm-kwargs ({', '.join(kwargs) or 'none given'}), "
                "and called as compute_reward(prompts, responses)"
            ) from None
        self._make = functools.partial(made_from, **defaults | kwargs)
        self._path = path
        self._made: Any = None
        self._lock = threading.Lock()
        self.is_being_made = False

    def __call__(self, samples: list[Sample]) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._new()
        return self._made.compute_reward([sample.prompt for sample in samples], [sample.response for sample in samples])

    def _new(self) -> Any:
        self.is_being_made = True
        try:
            return self._make()
        except BaseException as error:  # nothing can be scored, so this is no sample's failure
            raise RewardError(f"{FLAG} {self._path} cannot be made: {type(error).__name__}: {error}") from error
        finally:
            self.is_being_made = False


class BatchedFunction:
    """Scores samples in one call. Takes part in a `TolerantGroup`.

    Args:
        path: Where the function comes from, for messages.
        function: What scores.
        timeout: Time limit of one call, in seconds.
    """

    def __init__(self, path: str, function: Batched, *, timeout: float) -> None:
        self._path, self._function, self._timeout = path, function, timeout
        self._calls = FunctionCalls(f"{FLAG} {path}", function, timeout=timeout)

    async def __call__(self, group: Group) -> list[Outcome]:
        """Each sample's reward, or why what was returned for it is none.

        Raises:
            VerifierError: The call raised, took too long, or did not return one value for each sample.
            RewardError: The object that scores cannot be made; or too many calls go on without end.
        """
        try:
            with lent(group) as given:
                values = await self._calls(name_samples(group), given)
        except VerifierError as error:
            if isinstance(self._function, _Model) and self._function.is_being_made:
                raise RewardError(
                    f"{FLAG} {self._path} takes more than {self._timeout:g} s to be made; raise --rm-timeout"
                ) from error
            raise
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, list | tuple) or len(values) != len(group):
            raise VerifierError(
                f"{FLAG} {self._path} returned {str(values)[:200]} for {name_samples(group)}; "
                f"return a list of {len(group)} rewards"
            )
        return [self._outcome(value, sample) for value, sample in zip(values, group, strict=True)]

    def _outcome(self, value: Any, sample: Sample) -> Outcome:
        try:
            return checked_reward(value, self._path, sample)
        except VerifierError as error:
            return error


class BatchedReward:
    """Scores samples in batches: those that wait while a call runs are scored by the next one, at most 64.

    Args:
        score: Gives the rewards of a batch.
    """

    def __init__(self, score: GroupReward) -> None:
        self._score = score
        self._queues = PerLoop(_Queue)

    async def __call__(self, sample: Sample) -> RewardValue:
        """The sample's reward.

        Raises:
            RewardError: What the call of its batch raised.
        """
        queue = self._queues.here()
        answer: asyncio.Future[RewardValue] = asyncio.get_running_loop().create_future()
        queue.waiting.append((sample, answer))
        try:
            async with queue.turn:
                await asyncio.sleep(0)  # whatever comes in the same moment joins
                while not answer.done():
                    await self._score_next(queue)
            return await answer
        except asyncio.CancelledError:
            queue.waiting = [pair for pair in queue.waiting if pair[1] is not answer]
            answer.cancel()
            raise

    async def _score_next(self, queue: _Queue) -> None:
        batch, queue.waiting = queue.waiting[:_BATCH], queue.waiting[_BATCH:]
        try:
            values = await self._score([sample for sample, _ in batch])
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


class _Queue:
    """Of one event loop: the samples that wait, and whose turn it is to call."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Sample, asyncio.Future[RewardValue]]] = []
        self.turn = asyncio.Lock()
