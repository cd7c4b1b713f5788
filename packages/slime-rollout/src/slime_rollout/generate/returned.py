"""What a custom generate function gives back: checked, and completed to what is trained on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Group, Sample, Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate.hook_call import HookCall
from slime_rollout.generate.single_turn import clear_response

TOKENIZED_KEY = "tokenized_by_slime"
"""Entry of a sample's metadata: true where a function set its response as text alone. No engine's log-probs and weight
versions are known then, and the tokens may be others than the model's own."""
ROWS_PROMPT_KEY = "rows_prompt"
"""Entry of a sample's metadata until it is trained on: prompt and tokens as its row has them, where a function gave the
first sample of its trajectory others. What is generated anew begins with them."""


class Accepted:
    """Takes what a function returned for the samples it was called with.

    Args:
        where: The flag and the path, for messages.
        call: What it was called with.
        keeps_aborted: Whether a function that fails leaves unfinished responses as they are.
    """

    def __init__(self, where: str, call: HookCall, *, keeps_aborted: bool = False) -> None:
        self._where, self._call, self._keeps_aborted = where, call, keeps_aborted
        self._prompts = [sample.prompt_tokens for sample in call.samples]
        self._rows = [sample.metadata.get(ROWS_PROMPT_KEY) for sample in call.samples]
        self._handed = [sample.prompt for sample in call.samples]
        self._trajectories = [sample.trajectory for sample in call.samples]
        self._numbers = [(sample.index, sample.group_index, sample.trajectory_id) for sample in call.samples]

    def parts(self, value: Any) -> list[Sample]:
        """What to train on, in the samples' order.

        Of several samples of one trajectory all carry the first one's ``index`` until :func:`number_parts`.

        Raises:
            GenerationError: Something else than samples of these trajectories, one or more of each, was returned; or a
                sample lacks a response, or has fields that contradict each other.
        """
        returned = self._as_list(value)
        result: list[Sample] = []
        for place, trajectory in enumerate(self._trajectories):
            own = [part for part in returned if part.trajectory == trajectory]
            if not own:
                raise GenerationError(
                    f"{self._where} returned nothing for sample {self._numbers[place][0]}; return it with the status "
                    "`failed` to have it left out"
                )
            if len({id(part) for part in own}) < len(own):
                raise GenerationError(
                    f"{self._where} returned sample {self._numbers[place][0]} twice; make a copy (copy.deepcopy) for "
                    "each part of its trajectory"
                )
            for part in own:
                if part is self._call.samples[place] or part.prompt is self._handed[place]:
                    part.prompt = copy.deepcopy(self._call.prompts[place])
                self._complete(part, place)
            whole = own if len(own) == 1 and not self._begins_anew(own[0], place) else self._split(own, place)
            if not self._call.context.evaluation:
                self._keep_rows_prompt(whole[0], place)
            result += whole
        return result

    def restore(self) -> None:
        """Make the samples their prompts again, after a function that failed or was stopped."""
        for place, sample in enumerate(self._call.samples):
            if not (self._keeps_aborted and sample.status is Status.ABORTED):
                self._reset(sample, place)

    def _as_list(self, value: Any) -> list[Sample]:
        if value is None:
            value = list(self._call.samples)
        elif isinstance(value, Sample):
            value = [value]
        parts = value if isinstance(value, list | tuple) else None
        flat = [one for part in parts or () for one in (part if isinstance(part, list | tuple) else (part,))]
        if not flat or not all(isinstance(one, Sample) for one in flat):
            raise GenerationError(
                f"{self._where} returned {str(value)[:100]!r} for {self._names()}; return what it was called with"
            )
        if strangers := [one for one in flat if one.trajectory not in self._trajectories]:
            raise GenerationError(
                f"{self._where} returned sample {strangers[0].index} of trajectory {strangers[0].trajectory} for "
                f"{self._names()}; leave index and trajectory_id as they are, in all parts of a trajectory"
            )
        return flat

    def _complete(self, part: Sample, place: int) -> None:
        index, group_index, _ = self._numbers[place]
        where = f"{self._where}: sample {index}"
        if part.group_index != group_index:
            raise GenerationError(f"{where} was returned in group {part.group_index}, not {group_index}")
        text: Any = part.response  # functions set what they like
        if isinstance(text, str) and text and part.response_length == 0 and part.status is not Status.ABORTED:
            self._tokenize(part, place, where)
        try:
            part.to_bytes()  # checks each field, and that metadata can be written down
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

    def _tokenize(self, part: Sample, place: int, where: str) -> None:
        """The tokens of a response that is there as text alone, with the end token of a finished one."""
        if part.tokens != self._prompts[place]:
            raise GenerationError(
                f"{where} has other tokens than its prompt's and response_length 0; set response_length, or leave "
                "tokens alone and set response only"
            )
        tokenizer = self._call.context.tokenizer
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

    def _begins_anew(self, part: Sample, place: int) -> bool:
        """Whether a part that was cut off is needed as its prompt, and has another one: the function's own."""
        return part.status is Status.ABORTED and not self._keeps_aborted and part.prompt_tokens != self._prompts[place]

    def _split(self, own: list[Sample], place: int) -> list[Sample]:
        """Several samples of one trajectory; as long as one is unfinished, the trajectory begins anew."""
        if any(part.status is Status.ABORTED for part in own):
            sample = self._call.samples[place]
            self._reset(sample, place)
            sample.status = Status.ABORTED
            return [sample]
        for part in own:
            part.index, part.trajectory_id = self._numbers[place][0], self._trajectories[place]
        return own

    def _keep_rows_prompt(self, first: Sample, place: int) -> None:
        rows = self._rows[place] or {"prompt": self._call.prompts[place], "tokens": self._prompts[place]}
        if (first.prompt, first.prompt_tokens) == (rows["prompt"], rows["tokens"]):
            first.metadata.pop(ROWS_PROMPT_KEY, None)
        else:
            first.metadata[ROWS_PROMPT_KEY] = copy.deepcopy(rows)

    def _reset(self, sample: Sample, place: int) -> None:
        sample.index, sample.group_index, sample.trajectory_id = self._numbers[place]
        sample.prompt, sample.tokens = copy.deepcopy(self._call.prompts[place]), list(self._prompts[place])
        sample.response_length = 0
        clear_response(sample)

    def _names(self) -> str:
        first, last = self._numbers[0][0], self._numbers[-1][0]
        return f"sample {first}" if first == last else f"samples {first} to {last}"


def begin_anew(sample: Sample) -> None:
    """Make the first sample of a trajectory its row's prompt again, whatever a function made of that."""
    clear_response(sample)
    sample.metadata.pop(TOKENIZED_KEY, None)
    if (rows := sample.metadata.pop(ROWS_PROMPT_KEY, None)) is not None:
        sample.prompt, sample.tokens = rows["prompt"], list(rows["tokens"])


def forget_rows_prompts(groups: Iterable[Group]) -> None:
    """What is trained on is not generated anew."""
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
    """Give each sample of a trajectory an ``index`` of its own: the first keeps what it has.

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
        raise GenerationError(f"{where} has rollout_log_probs that are no finite numbers")
