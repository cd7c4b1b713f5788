"""Many samples at once, field by field, where all values are plain already.

`Sample.validate` takes some twenty calls a sample: most of the time, where responses are short. Here a call checks one
field of all samples. What is not as plain as it should be is not judged: the answer is ``None`` or ``False``, and the
caller asks `Sample.validate` of each, which makes it plain or says what is wrong.
"""

from __future__ import annotations

import array
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from slime_core.types.sample import Sample, Status

NAMES = tuple(field.name for field in dataclasses.fields(Sample))
Columns = dict[str, list[Any]]
"""By field, the values of all samples. The status is a `Status`."""

LISTS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "weight_versions")

_NONE = type(None)
_TYPES: dict[str, frozenset[type]] = {
    **dict.fromkeys(("index", "group_index", "response_length"), frozenset((int,))),
    **dict.fromkeys(("label", "session_id"), frozenset((str, _NONE))),
    **dict.fromkeys(("tokens", "weight_versions"), frozenset((list,))),
    **dict.fromkeys(("loss_mask", "rollout_log_probs", "teacher_log_probs"), frozenset((list, _NONE))),
    **dict.fromkeys(("metadata", "train_metadata"), frozenset((dict,))),
    "trajectory_id": frozenset((int, _NONE)),
    "prompt": frozenset((str, list)),
    "response": frozenset((str,)),
    "reward": frozenset((int, float, bool, dict, _NONE)),
    "status": frozenset((Status,)),
    "remove_sample": frozenset((bool,)),
}
_NUMBERS = frozenset((int, float, bool))
_ZEROS_AND_ONES = frozenset((0, 1))
_STATUS_TYPES = frozenset((str, Status))
_STATUSES = {status.value: status for status in Status}
_TEXTS = {status: str(status.value) for status in Status}
_END = 2**63  # integers beyond it are rare, and need a closer look
_AT_ONCE = 2**16  # numbers that are put into one list, so that memory is bounded whatever the lengths
_of_sample = operator.attrgetter(*NAMES)
_of_row = operator.itemgetter(*NAMES)


def columns_of_samples(samples: Sequence[Sample]) -> Columns | None:
    """The fields of samples. Lists of numbers are copies, all else is the samples' own.

    Returns:
        The columns, or ``None`` if a sample is of a subclass or lacks a field, or a field is of another type.
    """
    if set(map(type, samples)) != {Sample}:
        return None
    try:
        values = list(map(_of_sample, samples))
    except AttributeError:
        return None
    return _typed(_columns(values))


def columns_of_rows(rows: Sequence[dict[str, Any]]) -> Columns | None:
    """The fields of what `Sample.to_dict` gave. Lists of numbers are copies, all else is the rows' own.

    Returns:
        The columns, or ``None`` if a row has more or fewer fields than a sample, or a field is of another type.
    """
    if set(map(type, rows)) != {dict} or set(map(len, rows)) != {len(NAMES)}:
        return None
    try:
        values = list(map(_of_row, rows))
    except KeyError:  # of as many keys as there are fields, none is missing or unknown, or both
        return None
    columns = _columns(values)
    if not _STATUS_TYPES.issuperset(map(type, columns["status"])):
        return None
    try:
        columns["status"] = [_STATUSES[status] for status in columns["status"]]
    except KeyError:
        return None
    return _typed(columns)


def rows_of(columns: Columns) -> list[dict[str, Any]]:
    """The samples as `Sample.to_dict` gives them, of columns that :func:`are_valid`."""
    texts = [_TEXTS[status] for status in columns["status"]]
    # The dictionaries of objects share their keys, which takes less than half the time and memory.
    return [vars(sample) for sample in samples_of(columns | {"status": texts})]


def samples_of(columns: Columns) -> list[Sample]:
    """The samples, of columns that :func:`are_valid`: nothing is checked."""
    made = []
    for values in zip(*(columns[name] for name in NAMES), strict=True):
        sample = Sample.__new__(Sample)
        (
            sample.index,
            sample.group_index,
            sample.prompt,
            sample.label,
            sample.trajectory_id,
            sample.tokens,
            sample.response,
            sample.response_length,
            sample.loss_mask,
            sample.rollout_log_probs,
            sample.teacher_log_probs,
            sample.weight_versions,
            sample.reward,
            sample.status,
            sample.remove_sample,
            sample.session_id,
            sample.metadata,
            sample.train_metadata,
        ) = values
        made.append(sample)
    return made


def are_valid(columns: Columns) -> bool:
    """Whether `Sample.validate` would accept every sample and leave it as it is.

    Returns:
        ``False`` also where it would have to be asked, as for integers beyond 64 bits.
    """
    return (
        _are_at_least_0(columns["index"])
        and _are_at_least_0(columns["group_index"])
        and _are_at_least_0(_given(columns["trajectory_id"]))
        and _are_prompts(columns["prompt"])
        and _are_rewards(columns["reward"])
        and _are_lengths(columns)
        and all(map(_are_at_least_0, _pieces(columns["tokens"])))
        and all(map(_are_versions, _pieces(columns["weight_versions"])))
        and all(map(_are_zeros_and_ones, _pieces(_given(columns["loss_mask"]))))
        and all(map(_are_floats, _pieces(_given(columns["rollout_log_probs"]))))
        and all(map(_are_floats, _pieces(_given(columns["teacher_log_probs"]))))
    )


def _columns(values: list[tuple[Any, ...]]) -> Columns:
    return dict(zip(NAMES, map(list, zip(*values, strict=True)), strict=True))


def _typed(columns: Columns) -> Columns | None:
    if not all(types.issuperset(map(type, columns[name])) for name, types in _TYPES.items()):
        return None
    for name in LISTS:
        columns[name] = [None if items is None else items.copy() for items in columns[name]]
    return columns


def _given(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _pieces(lists: list[list[Any]]) -> Iterator[list[Any]]:
    """All items one after the other, in pieces of bounded size."""
    if len(lists) > 1 and sum(map(len, lists)) > _AT_ONCE:
        half = len(lists) // 2
        yield from _pieces(lists[:half])
        yield from _pieces(lists[half:])
    else:
        yield list(chain.from_iterable(lists))


def _are(kind: type, values: list[Any]) -> bool:
    return list(map(type, values)).count(kind) == len(values)


def _are_at_least_0(values: list[Any]) -> bool:
    if not _are(int, values):
        return False
    try:
        array.array("Q", values)  # the fastest of the calls that refuse what is negative
    except OverflowError:
        return False
    return True


def _are_versions(values: list[Any]) -> bool:
    if _are_at_least_0(values):
        return True
    return _are(int, values) and min(values) >= -1 and max(values) < _END


def _are_zeros_and_ones(values: list[Any]) -> bool:
    return _are(int, values) and _ZEROS_AND_ONES.issuperset(values)


def _are_floats(values: list[Any]) -> bool:
    return _are(float, values)


def _are_prompts(prompts: list[Any]) -> bool:
    chats = [prompt for prompt in prompts if type(prompt) is list]
    return all(_are(dict, messages) for messages in _pieces(chats))


def _are_rewards(rewards: list[Any]) -> bool:
    named = [reward for reward in rewards if type(reward) is dict]
    numbers = [reward for reward in rewards if type(reward) is not dict and reward is not None]
    numbers += chain.from_iterable(reward.values() for reward in named)
    return (
        all(_are(str, list(reward)) for reward in named)
        and _NUMBERS.issuperset(map(type, numbers))
        and all(-_END < number < _END for number in numbers if type(number) is int)
    )


def _are_lengths(columns: Columns) -> bool:
    """Whether all lists of a sample are as long as its response, and its tokens at least as long."""
    lengths: list[int] = columns["response_length"]
    return (
        min(lengths) >= 0
        and all(map(operator.le, lengths, map(len, columns["tokens"])))
        # No weight versions at all is what a sample has that no engine made.
        and [len(items) or length for items, length in zip(columns["weight_versions"], lengths, strict=True)] == lengths
        and all(_are_as_long(columns[name], lengths) for name in LISTS[1:4])
    )


def _are_as_long(lists: list[Any], lengths: list[int]) -> bool:
    found = [length if items is None else len(items) for items, length in zip(lists, lengths, strict=True)]
    return found == lengths
