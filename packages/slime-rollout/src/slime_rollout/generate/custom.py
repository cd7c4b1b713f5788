"""Custom generate functions: found by path, checked before the run, and called for the samples of a group.

Two forms, told apart by their arguments:

    async def custom_generate(args, sample, sampling_params, evaluation=False)  # one sample
    async def custom_generate(args, samples, evaluation=False)  # all samples of a prompt

Either may leave ``evaluation`` out.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from slime_core.errors import ConfigError, SlimeError
from slime_core.types import Group, Sample, Status
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import GenerationError
from slime_rollout.event_loop import PerLoop
from slime_rollout.generate.context import GenerateGroup, GenerationContext
from slime_rollout.generate.hook_call import HookCall, running
from slime_rollout.generate.returned import TOKENIZED_KEY, Accepted, begin_anew, by_trajectory
from slime_rollout.generate.single_turn import FINISHED, single_turn

FLAG = "--custom-generate-function-path"
USUAL_NAMES = ("custom_generate", "generate")
CONTINUES = "continues_aborted"
"""Attribute of a function that wants samples that were cut off (``ABORTED``) as they are, instead of begun anew."""


def make_generate(config: RolloutConfig) -> GenerateGroup:
    """How groups are generated: by ``--custom-generate-function-path``, or else in a single turn.

    Raises:
        ConfigError: The function cannot be loaded, is not async, or takes other arguments than one of the two forms.
    """
    path = config.custom_generate_function_path
    if path is None:
        return single_turn
    return CustomGenerate(path, timeout=config.custom_generate_timeout, calls=config.rollout_concurrency)


class CustomGenerate:
    """A function of the user's that generates. Is a :data:`~slime_rollout.generate.context.GenerateGroup`.

    The function gets samples that are their prompts, and what was given back finished it does not see. One that raises,
    or passes the time limit, ends the rollout.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn``, ``file.py:fn``, or ``file.py`` with a function ``custom_generate``.
        timeout: Time limit of one call, in seconds.
        calls: Most calls at once; the others wait, and their time limit has not begun.

    Raises:
        ConfigError: As :func:`make_generate`.
    """

    def __init__(self, path: str, *, timeout: float, calls: int) -> None:
        self._where = f"{FLAG} {path}"
        self._function = load_function(path, FLAG, usual_names=USUAL_NAMES)
        self.takes_group, self._takes_evaluation = _form(self._function, self._where)
        self._continues = bool(getattr(self._function, CONTINUES, False))
        self._timeout = timeout
        self._slots = PerLoop(lambda: asyncio.Semaphore(calls))

    @property
    def name(self) -> str:
        """The flag and the path, for messages."""
        return self._where

    @property
    def file(self) -> str | None:
        """The file that the function is written in, as its code names it."""
        function = inspect.unwrap(self._function)
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        return None if code is None else str(code.co_filename)

    def is_call(self, frame: FrameType) -> bool:
        """Whether a frame of a thread's stack is that of a call of the function, which is then further in."""
        return frame.f_code is CustomGenerate._limited.__code__

    def __call__(self, group: Group, context: GenerationContext) -> list[Awaitable[list[Sample]]]:
        """One piece of work for each sample, or one for the group."""
        if self.takes_group:
            return [self._generate_unfinished(group, context)]
        return [self._generate_unfinished([sample], context) for sample in group]

    async def _generate_unfinished(self, group: Group, context: GenerationContext) -> list[Sample]:
        unfinished = [sample for sample in group if sample.status not in FINISHED]
        if not unfinished:
            return group
        made = by_trajectory(await self._generate(unfinished, context))
        return [part for sample in group for part in made.get(sample.trajectory, [sample])]

    async def _generate(self, samples: list[Sample], context: GenerationContext) -> list[Sample]:
        async with self._slots.here():
            if context.stop.is_set():
                return samples
            for sample in samples:
                self._prepare(sample)
            call = HookCall(context, samples)
            accepted = Accepted(self._where, call, keeps_aborted=self._continues)
            try:
                with running(call):
                    value = await self._limited(call)
                for conversation in call.conversations.values():
                    conversation.close()
                return accepted.parts(value)
            except BaseException:
                accepted.restore()
                raise

    def _prepare(self, sample: Sample) -> None:
        if self._continues and sample.status is Status.ABORTED:
            sample.metadata.pop(TOKENIZED_KEY, None)
        else:
            begin_anew(sample)

    async def _limited(self, call: HookCall) -> Any:
        names = f"sample {call.samples[0].index}" if len(call.samples) == 1 else f"{len(call.samples)} samples"
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self._function(*self._positional(call), **self._named(call))
        except SlimeError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if limit.expired():
                raise GenerationError(
                    f"{self._where} took more than {self._timeout:g} s for {names}; give its tools time limits of "
                    "their own, or raise --custom-generate-timeout"
                ) from None
            text = " ".join(str(error).split())
            raise GenerationError(
                f"{self._where} raised {type(error).__name__} for {names}: {text}{_place(error)}"
            ) from error

    def _positional(self, call: HookCall) -> tuple[Any, ...]:
        context = call.context
        if self.takes_group:
            return context.args, list(call.samples)
        return context.args, call.sample, context.params.to_request(context.seed(call.sample))

    def _named(self, call: HookCall) -> dict[str, Any]:
        return {"evaluation": call.context.evaluation} if self._takes_evaluation else {}


def _form(function: Callable[..., Any], where: str) -> tuple[bool, bool]:
    """Whether a function takes a group, and whether it wants to know of evaluation.

    Raises:
        ConfigError: It has neither form.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if inspect.isclass(function) or not is_async:
        raise ConfigError(f"{where} is not async; write `async def`, so that many samples are generated at once")
    signature = inspect.signature(function)
    names = list(signature.parameters)
    takes_group = names[1:2] == ["samples"] and "sampling_params" not in names
    positional = ("args", "samples") if takes_group else ("args", "sample", "sampling_params")
    for named in ({"evaluation": False}, {}):
        try:
            signature.bind(*positional, **named)
        except TypeError:
            continue
        return takes_group, bool(named)
    raise ConfigError(
        f"{where} takes {signature}; write (args, sample, sampling_params, evaluation=False) for one sample, or "
        "(args, samples, evaluation=False) for all samples of a prompt"
    )


def _is_cancelled() -> bool:
    """Whether somebody asked the task to end, as opposed to a hook that awaited something else that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _place(error: BaseException) -> str:
    """Where an error comes from: the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
