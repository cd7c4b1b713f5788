"""Custom generate functions: found by path, checked before the run, and called for the samples of a group.

Two forms, which differ in their arguments:

    async def custom_generate(args, sample, sampling_params, evaluation=False)  # one sample
    async def custom_generate(args, samples, evaluation=False)  # all samples of a prompt

Either may leave ``evaluation`` out. Functions written for other loops find a `post`, the router's address and the
tokenizer here.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from slime_core.errors import ConfigError, SlimeError
from slime_core.hooks import HookArgs
from slime_core.types import Group, Sample, Status
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import GenerationError
from slime_rollout.generate.context import FINISHED, GenerateGroup, GenerationContext, single_turn
from slime_rollout.generate.hook_call import TOKENIZED_KEY, HookCall, begin_anew, by_trajectory, current
from slime_rollout.http import HttpError, excerpt, exchange, make_session

FLAG = "--custom-generate-function-path"
USUAL_NAMES = ("custom_generate", "generate")
CONTINUES = "continues_aborted"
"""Attribute of a function that wants samples that were cut off (``ABORTED``) unchanged, instead of as their prompts."""


def make_generate(config: RolloutConfig) -> GenerateGroup:
    """How groups are generated: by ``--custom-generate-function-path``, or else in a single turn.

    Raises:
        ConfigError: The function cannot be loaded, is not async, or takes other arguments than one of the two forms.
    """
    path = config.sampling.custom_generate_function_path
    if path is None:
        return single_turn
    return CustomGenerate(
        path, timeout=config.sampling.custom_generate_timeout, calls=config.sampling.rollout_concurrency
    )


class CustomGenerate:
    """A user-defined function that generates. Is a :data:`~slime_rollout.generate.context.GenerateGroup`.

    The function gets samples that are their prompts, and none that came finished. If it raises or passes the time
    limit, the rollout ends.

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
        self._slots = asyncio.Semaphore(calls)

    def __call__(self, group: Group, context: GenerationContext) -> list[Awaitable[list[Sample]]]:
        """One piece of work for each sample, or one for the group."""
        units = [group] if self.takes_group else [[sample] for sample in group]
        return [self._generate(unit, context) for unit in units]

    async def _generate(self, group: Group, context: GenerationContext) -> list[Sample]:
        """What to train on of some samples: finished ones unchanged, and what the function made of the others."""
        unfinished = [sample for sample in group if sample.status not in FINISHED]
        if not unfinished:
            return group
        async with self._slots:
            if context.stop.is_set():
                return group
            for sample in unfinished:
                if self._continues and sample.status is Status.ABORTED:
                    sample.metadata.pop(TOKENIZED_KEY, None)
                else:
                    begin_anew(sample)
            call = HookCall(context, unfinished, self._where, keeps_aborted=self._continues)
            with call.running():
                value = await self._limited(call)
                for conversation in call.conversations.values():
                    conversation.close()
                made = by_trajectory(call.accept(value))
        return [part for sample in group for part in made.get(sample.trajectory, [sample])]

    async def _limited(self, call: HookCall) -> Any:
        """Call the function within the time limit.

        Raises:
            GenerationError: It raised, or was not done in time.
        """
        context, count = call.context, len(call.samples)
        names = f"sample {call.samples[0].index}" if count == 1 else f"{count} samples"
        named = {"evaluation": context.evaluation} if self._takes_evaluation else {}
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                if self.takes_group:
                    return await self._function(context.args, list(call.samples), **named)
                params = context.params.to_request(context.seed(call.sample))
                return await self._function(context.args, call.sample, params, **named)
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


def _form(function: Callable[..., Any], where: str) -> tuple[bool, bool]:
    """Whether a function takes a group, and whether it takes ``evaluation``.

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
    """Whether the task is to end, as opposed to a hook that awaited something else that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _place(error: BaseException) -> str:
    """Where an error comes from: the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


async def post(url: str, payload: Any, *, timeout: float = 600.0) -> Any:
    """POST something as JSON to a tool's server, or to the router's ``/generate``, and return the answer's JSON.

    To sample from the engines, :class:`~slime_rollout.generate.Trajectory` is better: it keeps connections, retries,
    aborts what was cancelled, and checks the reply.

    Args:
        url: The address.
        payload: What JSON can hold.
        timeout: Time limit, in seconds.

    Raises:
        GenerationError: There was no answer in time, or it was an error or not JSON.
    """
    try:
        async with make_session(timeout) as session:
            content = await exchange(session, "POST", url, orjson.dumps(payload))
        return orjson.loads(content)
    except HttpError as error:
        how = "failed" if error.status is None else "was refused"
        raise GenerationError(f"POST {url} {how}: {error.problem}") from error
    except orjson.JSONDecodeError as error:
        raise GenerationError(f"POST {url} answered with no JSON: {excerpt(content)}") from error


def get_model_url(args: HookArgs, endpoint: str = "/generate") -> str:
    """Address of an endpoint of the router, from the ``args`` that a function was called with."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


class GenerateState:
    """The tokenizer, in the place where other loops keep it. Inside a custom generate function only.

    Attributes:
        args: What the function was called with.
        tokenizer: The model's.
    """

    def __init__(self, args: HookArgs) -> None:
        self.args = args
        self.tokenizer = current().context.tokenizer
