"""Custom reward functions and classes: found by path, checked before the run, called off the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, RewardValue
from slime_core.types import Group, Sample
from slime_core.types.checks import scalar
from slime_core.user_functions import load_function
from slime_rollout.errors import Outcome, RewardError, VerifierError, name_samples
from slime_rollout.rewards.rules import read_reward
from slime_rollout.rewards.trl import TrlReward, is_trl_form
from slime_rollout.threads import LoopThread, start_call

CallOutcome = tuple[Any, BaseException | None]
"""A function's value, or the error that it raised."""

FLAG = "--custom-rm-path"
_USUAL_NAMES = ("custom_rm", "CustomRewardModel")
_BATCH = 64  # samples

AT_ONCE = 32  # calls: enough for functions that wait, few enough that those that compute end within their limit
MOST_STUCK = 8
_PING_SECONDS = 0.25
_THREAD = "slime-reward"


class CustomReward:
    """A custom reward: a function ``(args, sample)`` or ``(args, samples)``, plain or ``async``, TRL's, or a class.

    A class has ``compute_reward(prompts, responses)``; its object is made, once, in the first call. A ``model_path``
    that its constructor needs and that is not given is ``--hf-checkpoint``. The path ``file.py`` alone means its
    ``custom_rm``, or else its ``CustomRewardModel``.

    ``timeout`` limits one call, in seconds. With ``group`` a function takes several samples, whatever its second
    argument is called. ``keys`` are parts of rewards that somebody trains on or reports.

    Raises:
        ConfigError: It cannot be loaded, or does not take the arguments.
    """

    def __init__(
        self,
        path: str,
        hook_args: HookArgs,
        *,
        timeout: float,
        kwargs: Mapping[str, Any] | None = None,
        group: bool = False,
        keys: Collection[str | None] = (),
    ) -> None:
        self._name, self._timeout, self._keys = f"{FLAG} {path}", timeout, keys
        self._model: _Model | None = None
        self.is_batched = True
        function: Callable[..., Any]
        found = load_function(path, FLAG, usual_names=_USUAL_NAMES)
        if inspect.isclass(found):
            function = self._model = _Model(found, self._name, kwargs or {}, hook_args)
        elif kwargs is not None:
            raise ConfigError(
                f"--custom-rm-kwargs is for a class; {self._name} is a function, which gets every flag in args"
            )
        elif is_trl_form(found):
            function = TrlReward(found, self._name, label_key=getattr(hook_args, "label_key", None))
        else:
            self.is_batched = group or list(inspect.signature(found).parameters)[1:2] == ["samples"]
            arguments = ("args", "samples" if self.is_batched else "sample")
            load_function(path, FLAG, arguments=arguments, usual_names=_USUAL_NAMES)
            function = functools.partial(found, hook_args)
        self._calls = FunctionCalls(self._name, function, timeout=timeout)

    async def __call__(self, sample: Sample) -> RewardValue:
        """The value of a function that takes one sample. Raises as :meth:`score`."""
        outcome = self._outcome(await self._calls(name_samples([sample]), sample), sample)
        if isinstance(outcome, VerifierError):
            raise outcome
        return outcome

    async def score(self, group: Group) -> list[Outcome]:
        """Of a function that takes several samples, or a class: each sample's reward, or why it has none.

        Raises `VerifierError` if the call failed, `RewardError` if the object cannot be made or too many calls hang.
        """
        try:
            values = await self._calls(name_samples(group), list(group))
        except VerifierError as error:
            if self._model is not None and self._model.is_being_made:
                raise RewardError(
                    f"{self._name} takes more than {self._timeout:g} s to be made; raise --rm-timeout"
                ) from error
            raise
        if hasattr(values, "tolist"):  # one score a row, as reward models give them, or numbers
            values = [scalar(row) for row in values] if getattr(values, "ndim", 1) else values
        if not isinstance(values, list | tuple) or len(values) != len(group):
            raise VerifierError(
                f"{self._name} returned {str(values)[:200]} for {name_samples(group)}; "
                f"return a list of {len(group)} rewards"
            )
        return [self._outcome(value, sample) for value, sample in zip(values, group, strict=True)]

    def _outcome(self, value: Any, sample: Sample) -> Outcome:
        reward = read_reward(value, self._keys)
        if reward is not None:
            return reward
        return VerifierError(
            f"{self._name} returned {_shown(value)} for sample {sample.index}; "
            "return a finite number, or a dictionary with one under the name that --reward-key gives"
        )


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


class _Model:
    """An object of a user-defined class, made in the first call."""

    def __init__(self, made_from: Any, name: str, kwargs: Mapping[str, Any], hook_args: HookArgs) -> None:
        try:
            signature, arguments = inspect.signature(made_from), dict(kwargs)
            wanted = signature.parameters.get("model_path")
            if wanted is not None and wanted.default is wanted.empty and "hf_checkpoint" in hook_args:
                arguments = {"model_path": hook_args.hf_checkpoint, **kwargs}
            signature.bind(**arguments)
            inspect.signature(made_from.compute_reward).bind(None, "prompts", "responses")
        except AttributeError:
            raise ConfigError(f"{name} is a class without compute_reward(self, prompts, responses)") from None
        except TypeError as error:
            raise ConfigError(
                f"{name}: {error}; it is made with --custom-rm-kwargs ({', '.join(kwargs) or 'none given'}), "
                "and called as compute_reward(prompts, responses)"
            ) from None
        self._make, self._name = functools.partial(made_from, **arguments), name
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
        except BaseException as error:  # nothing can be scored, so it is not the failure of one sample
            raise RewardError(f"{self._name} cannot be made: {type(error).__name__}: {error}") from error
        finally:
            self.is_being_made = False


class BatchedReward:
    """Scores samples in batches: those that wait while a call runs are scored by the next one, at most 64."""

    def __init__(self, score: GroupReward) -> None:
        self._score = score
        self._waiting: list[tuple[Sample, asyncio.Future[RewardValue]]] = []
        self._turn = asyncio.Lock()

    async def __call__(self, sample: Sample) -> RewardValue:
        """The sample's reward."""
        answer: asyncio.Future[RewardValue] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, answer))
        try:
            async with self._turn:
                await asyncio.sleep(0)  # samples that arrive at the same moment join
                while not answer.done():
                    await self._score_next()
            return await answer
        except asyncio.CancelledError:
            self._waiting = [pair for pair in self._waiting if pair[1] is not answer]
            answer.cancel()
            raise

    async def _score_next(self) -> None:
        batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
        try:
            values = await self._score([sample for sample, _ in batch])
        except RewardError as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        except BaseException:  # cancelled: the others of the batch still wait
            self._waiting[:0] = batch
            raise
        for (_, answer), value in zip(batch, values, strict=True):
            if not answer.done():
                answer.set_result(value)


class FunctionCalls:
    """Calls a user-defined function off the event loop, at most 32 times at once, each within a time limit in seconds.

    A plain function gets a thread for each call. A coroutine runs on an event loop in another thread; when a call
    blocks that loop, the next ones get a new one. A call cannot be stopped at its time limit: it is left behind and no
    longer counts as running. Once eight calls go on after twice their time limit, there are no more calls.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, timeout: float) -> None:
        self._name, self._function, self._timeout = name, function, timeout
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._running: dict[object, tuple[LoopThread | None, float]] = {}
        self._loop: LoopThread | None = None
        self._close_loop: Callable[[], Any] = lambda: None

    async def __call__(self, about: str, *args: Any) -> Any:
        """The function's value for ``args``; ``about`` says in messages what the call is about."""
        async with self._turns:
            self._refuse_if_stuck()
            try:
                async with asyncio.timeout(self._timeout):
                    value, error = await self._call(functools.partial(self._function, *args))
            except TimeoutError:
                await self._replace_blocked_loop()
                raise VerifierError(
                    f"{self._name} took more than {self._timeout:g} s for {about}; make it faster or raise --rm-timeout"
                ) from None
        if isinstance(error, RewardError):
            raise error
        if error is not None:
            raise VerifierError(f"{self._name} raised {type(error).__name__} for {about}: {error}") from error
        return value

    async def _call(self, function: Callable[[], Any]) -> CallOutcome:
        if inspect.iscoroutinefunction(self._function):
            return await self._on_loop(function)
        value, error = await self._in_thread(function)
        return await self._on_loop(lambda: value) if inspect.isawaitable(value) else (value, error)

    async def _in_thread(self, function: Callable[[], Any]) -> CallOutcome:
        call = object()

        def run() -> CallOutcome:
            try:
                return function(), None
            except BaseException as error:
                return None, error
            finally:
                del self._running[call]

        self._running[call] = None, time.monotonic()
        return await asyncio.wrap_future(start_call(_THREAD, run))

    async def _on_loop(self, function: Callable[[], Awaitable[Any]]) -> CallOutcome:
        call = object()

        async def run() -> CallOutcome:
            try:
                return await function(), None
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                return None, error  # a CancelledError too: something that it awaited was cancelled, not this call
            finally:
                del self._running[call]

        if self._loop is None:
            self._loop = LoopThread(_THREAD)
            self._close_loop = weakref.finalize(self, self._loop.close)
        self._running[call] = self._loop, time.monotonic()
        return await asyncio.wrap_future(self._loop.submit(run()))

    def _refuse_if_stuck(self) -> None:
        late = time.monotonic() - 2 * self._timeout
        # A blocked loop holds up every call on it, and only one of them is to blame.
        stuck = {
            call if loop is None or loop is self._loop else loop
            for call, (loop, start) in list(self._running.items())
            if start < late
        }
        if len(stuck) >= MOST_STUCK:
            raise RewardError(
                f"{self._name}: {len(stuck)} calls go on after twice their time limit of {self._timeout:g} s, and "
                "cannot be stopped; give what it waits for a time limit of its own"
            )

    async def _replace_blocked_loop(self) -> None:
        loop = self._loop
        if loop is not None and not await loop.responds(_PING_SECONDS) and self._loop is loop:
            self._loop = None
            self._close_loop()
