"""Groups as plain values that JSON can hold, and back."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterable, Iterator
from typing import Any

from slime_core.types import Group, Sample

PlainGroup = list[dict[str, Any]]

_LISTS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "weight_versions")
_NESTED = ("prompt", "reward", "metadata", "train_metadata")
_ATOMS = frozenset((str, int, float, bool, type(None)))


def plain_groups(groups: Iterable[Group]) -> list[PlainGroup]:
    """Every field of every sample. Nothing is shared with the samples.

    Raises:
        DataError: A field is invalid; better now than when the state is to be loaded.
    """
    with _uncollected():
        return [[_plain(sample) for sample in group] for group in groups]


def groups_from_plain(groups: Iterable[PlainGroup]) -> list[Group]:
    """The reverse of :func:`plain_groups`. Nothing is shared with ``groups``.

    Raises:
        DataError: A field is unknown, missing or invalid.
    """
    with _uncollected():
        return [[_sample(values) for values in group] for group in groups]


def copied_group(group: Group) -> Group:
    """A copy that shares nothing with the group."""
    return [_copied(sample) for sample in group]


def copied_value(value: Any) -> Any:
    """A copy that shares nothing with ``value``: many times as fast as `copy.deepcopy`, for what JSON can hold."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: copied_value(item) for key, item in value.items()}
    if kind is list:
        return [copied_value(item) for item in value]
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
    for name in _LISTS:
        if (items := values.get(name)) is not None:
            values[name] = list(items)
    for name in _NESTED:
        if isinstance(nested := values.get(name), dict | list):
            values[name] = copied_value(nested)
    return values
