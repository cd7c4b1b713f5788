"""A call of a custom generate function: what it gets, and what it returns, completed to what is trained on."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Group, Prompt, Sample, Status
from slime_core.types.arrays import columns_of
from slime_rollout.errors import GenerationError
from slime_rollout.generate.context import GenerationContext, clear_response

TOKENIZED_KEY = "tokenized_by_slime"
"""Entry of a sample's metadata: true where a function set its response as text alone. Then there are no log-probs and
weight versions of an engine, and the tokens may be others than the model's own."""
ROWS_PROMPT_KEY = "rows_prompt"
"""Entry of a sample's metadata until it is trained on: prompt and tokens as its row has them, where a function changed
those of the first sample of its trajectory. If the sample is generated again, it begins with them."""


class HookCall:
    """One call of a custom generate function: the samples it gets, and what is made of the ones it returns.

    Args:
        context: Where requests go, and what they are for.
        samples: The samples that it is called with, as they are before.
        where: The flag and the path, for messages.
        keeps_aborted: Whether a function that fails leaves unfinished responses as they are.

    Attributes:
        context: As given.
        samples: As given.
        conversations: What `generate_single` keeps of each sample's conversation, by the sample's index.
    """

    def __init__(self, context: GenerationContext, samples: Group, where: str, *, keeps_aborted: bool = False) -> None:
        self.context, self.samples = context, samples
        self.conversations: dict[int, Any] = {}
        self._where, self._keeps_aborted = where, keeps_aborted
        self._given = [_Given(sample) for sample in samples]

    @property
    def sample(self) -> Sample:
        """The sample, of a function that gets one.

        Raises:
            GenerationError: The function got several.
        """
        if len(self.samples) != 1:
            raise GenerationError(f"this function was called with {len(self.samples)} samples; say which one is meant")
        return self.samples[0]

    def prompt_of(self, sample: Sample) -> Prompt:
        """A sample's prompt, as it was before the function was called."""
        return next(given.prompt for given in self._given if given.sample is sample)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, :func:`current` returns this call. The samples of a call that fails are restored."""
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
        """What to train on, in the samples' order.

        Of several samples of one trajectory all carry the first one's ``index`` until :func:`number_parts`.

        Args:
            value: What the function returned.

        Raises:
            GenerationError: Something else than samples of these trajectories, one or more of each, was returned; or a
                sample lacks a response, or has fields that contradict each other.
        """
        returned, result = self._as_list(value), []
        for given in self._given:
            own = [part for part in returned if part.trajectory == given.trajectory]
            if not own:
                raise GenerationError(
                    f"{self._where} returned nothing for sample {given.index}; return it with the status `failed` to "
                    "have it left out"
                )
            if len({id(part) for part in own}) < len(own):
                raise GenerationError(
                    f"{self._where} returned sample {given.index} twice; make a copy (copy.deepcopy) for each part of "
                    "its trajectory"
                )
            for part in own:
                self._complete(part, given)
            result += self._whole(own, given)
        return result

    def _as_list(self, value: Any) -> list[Sample]:
        first, last = self._given[0].index, self._given[-1].index
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
        trajectories = {given.trajectory for given in self._given}
        if strangers := [one for one in flat if one.trajectory not in trajectories]:
            raise GenerationError(
                f"{self._where} returned sample {strangers[0].index} of trajectory {strangers[0].trajectory} for "
                f"{names}; leave index and trajectory_id as they are, in all parts of a trajectory"
            )
        return flat

    def _complete(self, part: Sample, given: _Given) -> None:
        """Check a part, and fill in what a function may leave out: tokens of a text, and a status."""
        where = f"{self._where}: sample {given.index}"
        if part is given.sample or part.prompt is given.handed_prompt:
            part.prompt = copy.deepcopy(given.prompt)
        if part.group_index != given.group_index:
            raise GenerationError(f"{where} was returned in group {part.group_index}, not {given.group_index}")
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
                    "`failed` to have it left out"
                )
            part.status = Status.COMPLETED
        if part.status is Status.ABORTED:
            part.reward = None  # it is scored once it is finished
        if part.response_length and part.response_length == len(part.tokens):
            raise GenerationError(f"{where} has a response of {part.response_length} tokens and none of the prompt")
        _check_numbers(part, where)

    def _tokenize(self, part: Sample, given: _Given, where: str) -> None:
        """The tokens of a response that is there as text alone, with the end token of a finished one."""
        if part.tokens != given.tokens:
            raise GenerationError(
                f"{where} has other tokens than its prompt's and response_length 0; set response_length, or leave "
                "tokens alone and set response only"
            )
        tokenizer = self.context.tokenizer
        if tokenizer is None:
            raise GenerationError(f"{where} has a response as text, and there is no tokenizer for it")
        tokens = list(tokenizer(part.response, add_special_tokens=False)["input_ids"])
        end = tokenizer.eos_token_id
        if part.status in (Status.PENDING, Status.COMPLETED) and end is not None and tokens[-1:] != [end]:
            tokens.append(end)
        part.tokens = [*part.tokens, *tokens]
        part.response_length = len(tokens)
        part.rollout_log_probs, part.weight_versions = None, []
        part.metadata[TOKENIZED_KEY] = True

    def _whole(self, own: list[Sample], given: _Given) -> list[Sample]:
        """The parts of a trajectory, or its sample as the row's prompt if it has to begin again.

        It has to if one of several parts is unfinished, or if the one part is and its function changed the prompt.
        """
        cut_off = any(part.status is Status.ABORTED for part in own)
        if cut_off and (len(own) > 1 or (not self._keeps_aborted and own[0].prompt_tokens != given.tokens)):
            given.reset()
            given.sample.status = Status.ABORTED
            own = [given.sample]
        elif len(own) > 1:
            for part in own:
                part.index, part.trajectory_id = given.index, given.trajectory
        if not self.context.evaluation:
            given.note_rows_prompt(own[0])
        return own


class _Given:
    """A sample as it was when the function was called, which may change it."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.prompt = sample, copy.deepcopy(sample.prompt)  # functions like to append to the list they get
        self.handed_prompt, self.tokens = sample.prompt, sample.prompt_tokens
        self.index, self.group_index, self.trajectory = sample.index, sample.group_index, sample.trajectory
        self._trajectory_id = sample.trajectory_id
        self._rows = sample.metadata.get(ROWS_PROMPT_KEY) or {"prompt": self.prompt, "tokens": self.tokens}

    def reset(self) -> None:
        """Make the sample its prompt again."""
        sample = self.sample
        sample.index, sample.group_index, sample.trajectory_id = self.index, self.group_index, self._trajectory_id
        sample.prompt, sample.tokens = copy.deepcopy(self.prompt), list(self.tokens)
        sample.response_length = 0
        clear_response(sample)

    def note_rows_prompt(self, first: Sample) -> None:
        """Keep the row's prompt on the first sample of the trajectory if that has another one now."""
        if (first.prompt, first.prompt_tokens) == (self._rows["prompt"], self._rows["tokens"]):
            first.metadata.pop(ROWS_PROMPT_KEY, None)
        else:
            first.metadata[ROWS_PROMPT_KEY] = copy.deepcopy(self._rows)


_CALL: contextvars.ContextVar[HookCall] = contextvars.ContextVar("slime_custom_generate")


def current() -> HookCall:
    """The call of a custom generate function that this code runs in, also from tasks that the function started.

    Raises:
        GenerationError: It runs in none.
    """
    try:
        return _CALL.get()
    except LookupError:
        raise GenerationError(
            "this is for custom generate functions while a rollout runs; elsewhere, make a Trajectory with its context"
        ) from None


def begin_anew(sample: Sample) -> None:
    """Make the first sample of a trajectory its row's prompt again, even if a function changed that."""
    clear_response(sample)
    sample.metadata.pop(TOKENIZED_KEY, None)
    if (rows := sample.metadata.pop(ROWS_PROMPT_KEY, None)) is not None:
        sample.prompt, sample.tokens = rows["prompt"], list(rows["tokens"])


def forget_rows_prompts(groups: Iterable[Group]) -> None:
    """Remove the rows' prompts of samples that are trained on, and so not generated again."""
    for group in groups:
        for sample in group:
            sample.metadata.pop(ROWS_PROMPT_KEY, None)


def by_trajectory(group: Iterable[Sample]) -> dict[int, list[Sample]]:
    """The samples of each trajectory, by its number, in their order."""
    parts: dict[int, list[Sample]] = {}
    for sample in group:
        parts.setdefault(sample.trajectory, []).append(sample)
    return parts


def number_parts(groups: Iterable[Group], fresh: Callable[[], int]) -> None:
    """Give each sample of a trajectory its own ``index``: the first keeps what it has.

    Args:
        groups: What was collected, in its final order, so that a resumed run numbers alike.
        fresh: Gives a number that no sample has, such as `RolloutDataSource.fresh_index`.
    """
    for group in groups:
        taken: set[int] = set()
        for sample in group:
            if sample.index in taken:
                sample.index = fresh()
            taken.add(sample.index)


def _check_numbers(part: Sample, where: str) -> None:
    rewards = part.reward if isinstance(part.reward, dict) else {"": part.reward or 0.0}
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise GenerationError(f"{where} has the reward {part.reward}; set a finite number, numbers by name, or None")
    if part.rollout_log_probs is not None and not all(map(math.isfinite, part.rollout_log_probs)):
        raise GenerationError(f"{where} has rollout_log_probs that are not finite")
