"""Groups as plain values that JSON can hold, and back."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from slime_core.types import Group, Sample
from slime_rollout.data import plain_columns as columns

PlainGroup = list[dict[str, Any]]
From = TypeVar("From")
To = TypeVar("To")

_AT_ONCE = 256  # samples, so that what is needed for a moment stays small
_NESTED = ("prompt", "reward", "metadata", "train_metadata")
_ATOMS = frozenset((str, int, float, bool, type(None)))


def plain_groups(groups: Iterable[Group]) -> list[PlainGroup]:
    """Every field of every sample. Nothing is shared with the samples.

    Raises:
        DataError: A field is invalid; better now than when the state is to be loaded.
    """
    with _uncollected():
        return _in_portions(groups, _plain_samples)


def groups_from_plain(groups: Iterable[PlainGroup]) -> list[Group]:
    """The reverse of :func:`plain_groups`. Nothing is shared with ``groups``.

    Raises:
        DataError: A field is unknown, missing or invalid.
    """
    with _uncollected():
        return _in_portions(groups, _samples)


def copied_group(group: Group) -> Group:
    """A copy that shares nothing with the group."""
    return [_copied(sample) for sample in group]


def copied_value(value: Any) -> Any:
    """A copy that shares nothing with ``value``: many times as fast as `copy.deepcopy`, for what JSON can hold."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        # A copy first, which nothing interrupts: a hook that was left behind may be adding to it.
        return {key: item if type(item) in _ATOMS else copied_value(item) for key, item in value.copy().items()}
    if kind is list:
        return [item if type(item) in _ATOMS else copied_value(item) for item in value]
    return copy.deepcopy(value)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: all that is made here is kept, and it would walk over it again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _in_portions(groups: Iterable[list[From]], convert: Callable[[list[From]], list[To]]) -> list[list[To]]:
    """Convert some hundred samples at a time, in their groups."""
    done: list[list[To]] = []
    portion: list[From] = []
    sizes: list[int] = []

    def finish_portion() -> None:
        converted = iter(convert(portion))
        done.extend(list(islice(converted, size)) for size in sizes)
        portion.clear()
        sizes.clear()

    for group in groups:
        before = len(portion)
        portion.extend(group)
        sizes.append(len(portion) - before)
        if len(portion) >= _AT_ONCE:
            finish_portion()
    finish_portion()
    return done


def _plain_samples(samples: list[Sample]) -> list[dict[str, Any]]:
    fields = _valid_columns(columns.columns_of_samples(samples))
    return [_plain(sample) for sample in samples] if fields is None else columns.rows_of(fields)


def _samples(rows: list[dict[str, Any]]) -> list[Sample]:
    fields = _valid_columns(columns.columns_of_rows(rows))
    return [_sample(row) for row in rows] if fields is None else columns.samples_of(fields)


def _valid_columns(fields: columns.Columns | None) -> columns.Columns | None:
    """The columns, sharing nothing; ``None`` if not all samples are valid and plain, so that each needs a look."""
    if fields is None or not columns.are_valid(fields):
        return None
    for name in _NESTED:
        if not _ATOMS.issuperset(map(type, fields[name])):
            fields[name] = [copied_value(value) if value != {} else {} for value in fields[name]]
    return fields


def _copied(sample: Sample) -> Sample:
    copied = copy.copy(sample)
    _unshared(vars(copied))
    return copied


def _plain(sample: Sample) -> dict[str, Any]:
    sample.validate()
    return _unshared(sample.to_dict())


def _sample(values: dict[str, Any]) -> Sample:
    sample = Sample.from_dict(values)
    _unshared(vars(sample))
    return sample


def _unshared(values: dict[str, Any]) -> dict[str, Any]:
    """The same dictionary, with copies of what can change in it: most lists hold numbers."""
    for name in columns.LISTS:
        if (items := values.get(name)) is not None:
            values[name] = list(items)
    for name in _NESTED:
        if isinstance(nested := values.get(name), dict | list):
            values[name] = copied_value(nested)
    return values
