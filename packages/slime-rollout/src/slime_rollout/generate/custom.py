"""Custom generate functions: found by path, checked before the run, called, and what they return completed.

Two forms, which differ in their arguments:

    async def custom_generate(args, sample, sampling_params, evaluation=False)  # one sample
    async def custom_generate(args, samples, evaluation=False)  # all samples of a prompt

Either may leave ``evaluation`` out.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from slime_core.errors import ConfigError, DataError, SlimeError
from slime_core.types import Group, Prompt, Sample, Status
from slime_core.types.arrays import columns_of
from slime_core.user_functions import load_function
from slime_rollout.config import RolloutConfig
from slime_rollout.data.chat import TextError, encode_text
from slime_rollout.data.ledger import by_trajectory
from slime_rollout.errors import GenerationError, is_number
from slime_rollout.generate.context import FINISHED, GenerateGroup, GenerationContext, clear_response, single_turn

FLAG = "--custom-generate-function-path"
USUAL_NAMES = ("custom_generate", "generate")
CONTINUES = "continues_aborted"
"""Attribute of a function that wants samples that were cut off (``ABORTED``) unchanged, instead of as their prompts."""
TOKENIZED_KEY = "tokenized_by_slime"
"""Entry of a sample's metadata: true where a function set its response as text alone. Such a response has no log-probs
and weight versions of an engine, and its tokens may differ from the model's own."""
ROWS_PROMPT_KEY = "rows_prompt"
"""Entry of a sample's metadata until it is trained on: prompt and tokens of its row, where a function changed those of
the first sample of its trajectory. If the sample is generated again, it begins with them."""


def make_generate(config: RolloutConfig) -> GenerateGroup:
    """How groups are generated: by ``--custom-generate-function-path``, or else in a single turn.

    Raises:
        ConfigError: The function cannot be loaded, is not async, or its arguments are of neither form.
    """
    path = config.sampling.custom_generate_function_path
    if path is None:
        return single_turn
    return CustomGenerate(
        path, timeout=config.sampling.custom_generate_timeout, calls=config.sampling.rollout_concurrency
    )


class CustomGenerate:
    """A custom generate function. A :data:`~slime_rollout.generate.context.GenerateGroup`.

    The function gets samples without a response, and none that were finished before. If it raises or exceeds the time
    limit, the rollout fails.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn``, ``file.py:fn``, or ``file.py`` with a function ``custom_generate``.
        timeout: Time limit of one call, in seconds.
        calls: Most calls at once; the others are queued, which does not count towards their time limit.

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
        """The samples to train on: finished ones unchanged, and what the function made of the others."""
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
        """Call the function within the time limit. Raises GenerationError if it raised, or was not done in time."""
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
        except TextError as error:
            raise TextError(f"{self._where} for {names}: {error}") from None
        except SlimeError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this task is cancelled, not only something that the function awaited
            if limit.expired():
                raise GenerationError(
                    f"{self._where} took more than {self._timeout:g} s for {names}; give its tools time limits of "
                    "their own, or raise --custom-generate-timeout"
                ) from None
            text = " ".join(str(error).split())
            (*_, last) = traceback.extract_tb(error.__traceback__)
            raise GenerationError(
                f"{self._where} raised {type(error).__name__} for {names}: {text} ({last.filename}, line {last.lineno})"
            ) from error


def _form(function: Callable[..., Any], where: str) -> tuple[bool, bool]:
    """Whether a function takes a group, and ``evaluation``. Raises ConfigError if it has neither form."""
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


class HookCall:
    """One call of a custom generate function with ``samples``; ``where`` is the flag and the path, for messages.

    With ``keeps_aborted``, a function that fails leaves unfinished responses as they are. ``conversations`` holds what
    `generate_single` keeps of each sample's conversation, by the sample's index.
    """

    def __init__(self, context: GenerationContext, samples: Group, where: str, *, keeps_aborted: bool) -> None:
        self.context, self.samples = context, samples
        self.conversations: dict[int, Any] = {}
        self._asked: Counter[tuple[int, str]] = Counter()
        self._where, self._keeps_aborted = where, keeps_aborted
        self._given = [_Given(sample) for sample in samples]

    @property
    def sample(self) -> Sample:
        """The sample of a function that takes one. Raises GenerationError if it got several."""
        if len(self.samples) != 1:
            raise GenerationError(f"this function was called with {len(self.samples)} samples; say which one is meant")
        return self.samples[0]

    def count(self, sample: Sample, asked: Any) -> int:
        """How often the same was asked for a sample before, while it had as many tokens."""
        key = (sample.index, f"{len(sample.tokens)} {asked!r}")
        self._asked[key] += 1
        return self._asked[key] - 1

    def prompt_of(self, sample: Sample) -> Prompt:
        """A sample's prompt before the call."""
        return next(given.before.prompt for given in self._given if given.sample is sample)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, :func:`current` returns this call. If it fails, the samples are restored."""
        token = _CALL.set(self)
        try:
            yield
        except BaseException:
            for given in self._given:
                if not (self._keeps_aborted and given.sample.status is Status.ABORTED):
                    given.reset()
            raise
        finally:
            _CALL.reset(token)

    def accept(self, value: Any) -> list[Sample]:
        """The samples to train on of a function's value, in their order.

        Several samples of one trajectory carry the first one's ``index`` until :func:`number_parts`.

        Raises:
            GenerationError: The value is not one or more samples of each trajectory; or a sample lacks a response, or
                has fields that contradict each other.
        """
        returned, result = self._as_list(value), []
        for given in self._given:
            own, index = [part for part in returned if part.trajectory == given.before.trajectory], given.before.index
            if not own:
                raise GenerationError(
                    f"{self._where} returned nothing for sample {index}; to leave it out, return it as `failed`"
                )
            if len({id(part) for part in own}) < len(own):
                raise GenerationError(
                    f"{self._where} returned sample {index} twice; make a copy (copy.deepcopy) for each part of its "
                    "trajectory"
                )
            for part in own:
                self._complete(part, given)
            result += self._whole(own, given)
        return result

    def _as_list(self, value: Any) -> list[Sample]:
        first, last = self._given[0].before.index, self._given[-1].before.index
        names = f"sample {first}" if first == last else f"samples {first} to {last}"
        if value is None:
            value = list(self.samples)
        elif isinstance(value, Sample):
            value = [value]
        parts = value if isinstance(value, list | tuple) else ()
        flat = [one for part in parts for one in (part if isinstance(part, list | tuple) else (part,))]
        if not flat or not all(isinstance(one, Sample) for one in flat):
            raise GenerationError(
                f"{self._where} returned {str(value)[:100]!r} for {names}; return what it was called with"
            )
        trajectories = {given.before.trajectory for given in self._given}
        if strangers := [one for one in flat if one.trajectory not in trajectories]:
            raise GenerationError(
                f"{self._where} returned sample {strangers[0].index} of trajectory {strangers[0].trajectory} for "
                f"{names}; leave index and trajectory_id as they are, in all parts of a trajectory"
            )
        return flat

    def _complete(self, part: Sample, given: _Given) -> None:
        """Check a part, and fill in the status and the tokens of a text, which a function may leave out."""
        where = f"{self._where}: sample {given.before.index}"
        if part is given.sample or part.prompt is given.handed_prompt:
            part.prompt = copy.deepcopy(given.before.prompt)
        if part.group_index != given.before.group_index:
            raise GenerationError(f"{where} was returned in group {part.group_index}, not {given.before.group_index}")
        text: Any = part.response  # functions set what they like
        if isinstance(text, str) and text and part.response_length == 0 and part.status is not Status.ABORTED:
            self._tokenize(part, given, where)
        try:
            columns_of([part])  # checks each field, and that metadata can be written down
        except DataError as error:
            raise GenerationError(f"{self._where} left {error}") from error
        if part.status is Status.PENDING:
            if not part.response_length:
                raise GenerationError(
                    f"{where} came back without a response; set response, or tokens and response_length, or the status "
                    "`failed` to leave it out"
                )
            part.status = Status.COMPLETED
        if part.status is Status.ABORTED:
            part.reward = None  # it is scored once it is finished
        if part.response_length and part.response_length == len(part.tokens):
            raise GenerationError(f"{where} has a response of {part.response_length} tokens and none of the prompt")
        _check_numbers(part, where)
        limits = self.context.limits
        if problem := limits.token_problem(part.tokens, self.context.tokenizer):
            raise GenerationError(f"{where} has a wrong token: {problem}")
        if problem := limits.length_problem(len(part.tokens)):
            raise GenerationError(f"{where} has a response of {part.response_length}: {problem}; cut it")

    def _tokenize(self, part: Sample, given: _Given, where: str) -> None:
        """Tokenize a response that was set as text alone, with the end token if it is finished."""
        given_tokens: Any = part.tokens  # perhaps an array
        if (given_tokens.tolist() if hasattr(given_tokens, "tolist") else given_tokens) != given.before.tokens:
            raise GenerationError(
                f"{where} has other tokens than its prompt's and response_length 0; set response_length, or leave "
                "tokens alone and set response only"
            )
        tokenizer = self.context.tokenizer
        if tokenizer is None:
            raise GenerationError(f"{where} has a response as text, which needs a tokenizer, and the context has none")
        try:
            tokens = encode_text(tokenizer, part.response)
        except TextError as error:
            raise TextError(f"{where} has a response that cannot be tokenized: {error}") from None
        end = tokenizer.eos_token_id
        if part.status in (Status.PENDING, Status.COMPLETED) and end is not None and tokens[-1:] != [end]:
            tokens.append(end)
            part.response += tokenizer.decode([end], skip_special_tokens=self.context.params.skip_special_tokens)
        part.tokens = [*given.before.tokens, *tokens]
        part.response_length = len(tokens)
        part.rollout_log_probs, part.weight_versions = None, []
        part.kept_tokens = part.routed_experts = None
        part.metadata[TOKENIZED_KEY] = True

    def _whole(self, own: list[Sample], given: _Given) -> list[Sample]:
        """The parts of a trajectory, or its sample without a response if it has to begin again."""
        cut_off = any(part.status is Status.ABORTED for part in own)
        if cut_off and (len(own) > 1 or (not self._keeps_aborted and own[0].prompt_tokens != given.before.tokens)):
            given.reset()
            given.sample.status = Status.ABORTED
            own = [given.sample]
        elif len(own) > 1:
            for part in own:
                part.index, part.trajectory_id = given.before.index, given.before.trajectory
        if not self.context.evaluation:
            given.note_rows_prompt(own[0])
        return own


class _Given:
    """A sample that a function was called with, and a copy of what it was before."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.handed_prompt = sample, sample.prompt
        self.before = before = copy.copy(sample)
        before.prompt = copy.deepcopy(sample.prompt)  # functions like to append to the list they get
        before.tokens = sample.prompt_tokens
        self._rows = sample.metadata.get(ROWS_PROMPT_KEY) or {"prompt": before.prompt, "tokens": before.tokens}

    def reset(self) -> None:
        """Make the sample its prompt again."""
        sample, before = self.sample, self.before
        sample.index, sample.group_index, sample.trajectory_id = before.index, before.group_index, before.trajectory_id
        sample.prompt, sample.tokens = copy.deepcopy(before.prompt), list(before.tokens)
        sample.response_length = 0
        clear_response(sample)

    def note_rows_prompt(self, first: Sample) -> None:
        """Keep the row's prompt on the first sample of the trajectory if that has a different one now."""
        if (first.prompt, first.prompt_tokens) == (self._rows["prompt"], self._rows["tokens"]):
            first.metadata.pop(ROWS_PROMPT_KEY, None)
        else:
            first.metadata[ROWS_PROMPT_KEY] = copy.deepcopy(self._rows)


_CALL: contextvars.ContextVar[HookCall] = contextvars.ContextVar("slime_custom_generate")


def current() -> HookCall:
    """The call of the custom generate function that runs here or started this task; a `GenerationError` without one."""
    try:
        return _CALL.get()
    except LookupError:
        raise GenerationError(
            "this is for custom generate functions while a rollout runs; elsewhere, make a Trajectory with its context"
        ) from None


def begin_anew(sample: Sample) -> None:
    """Reset the first sample of a trajectory to its row's prompt, even if a function changed that."""
    clear_response(sample)
    sample.metadata.pop(TOKENIZED_KEY, None)
    if (rows := sample.metadata.pop(ROWS_PROMPT_KEY, None)) is not None:
        sample.prompt, sample.tokens = rows["prompt"], list(rows["tokens"])


def forget_rows_prompts(groups: Iterable[Group]) -> None:
    """Remove the rows' prompts from samples that are trained on, and so not generated again."""
    for group in groups:
        for sample in group:
            sample.metadata.pop(ROWS_PROMPT_KEY, None)


def number_parts(groups: Iterable[Group], fresh: Callable[[], int]) -> None:
    """Give each sample of a trajectory its own ``index``: the first keeps its own, the others get ``fresh()``.

    The groups are in their final order, so that a resumed run numbers alike.
    """
    for group in groups:
        taken: set[int] = set()
        for sample in group:
            if sample.index in taken:
                sample.index = fresh()
            taken.add(sample.index)


def _check_numbers(part: Sample, where: str) -> None:
    reward = part.reward
    rewards = [value for value in reward.values() if is_number(value)] if isinstance(reward, dict) else [reward or 0.0]
    if not any(map(math.isfinite, rewards)):
        raise GenerationError(f"{where} has the reward {part.reward}; set a finite number, numbers by name, or None")
    if part.rollout_log_probs is not None and not all(map(math.isfinite, part.rollout_log_probs)):
        raise GenerationError(f"{where} has rollout_log_probs that are not finite")
