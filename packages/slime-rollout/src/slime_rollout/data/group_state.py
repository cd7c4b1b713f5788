"""Groups as plain values that JSON can hold, and back; copies of groups."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slime_core.types import Group, Sample, Status
from slime_core.types.kept import is_kept
from slime_core.types.routed import is_routed

PlainGroup = list[dict[str, Any]]

_ATOMS = frozenset((str, int, float, bool, type(None), Status))
_FIELDS = dict.fromkeys(field.name for field in dataclasses.fields(Sample))
_UNTYPED = ("prompt", "metadata", "train_metadata")  # msgspec copies all other fields

_Index = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Number = bool | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float


@dataclasses.dataclass(kw_only=True)
class _Checked(Sample):
    """A sample that msgspec made and checked, except lengths: `Sample.validate` takes several times as long.

    What msgspec refuses is not always invalid: `Sample.validate` decides that, and makes numbers of other libraries
    plain.
    """

    index: _Index
    group_index: _Index
    trajectory_id: _Index | None = None
    tokens: list[_Index] = dataclasses.field(default_factory=list)
    loss_mask: list[Annotated[int, Meta(ge=0, le=1)]] | None = None
    weight_versions: list[Annotated[int, Meta(ge=-1, le=2**63 - 1)]] = dataclasses.field(default_factory=list)
    reward: _Number | dict[str, _Number] | None = None

    def __post_init__(self) -> None:
        pass


def plain_groups(groups: Iterable[Group]) -> list[PlainGroup]:
    """Every field of every sample, sharing nothing. What is invalid is a `DataError` now, not only when loading."""
    with _uncollected():
        return [_plain(group) for group in groups]


def groups_from_plain(groups: Iterable[PlainGroup]) -> list[Group]:
    """The reverse of :func:`plain_groups`, sharing nothing; `DataError` if a field is unknown, missing or invalid."""
    with _uncollected():
        return [_restored(rows) for rows in groups]


def copied_group(group: Group) -> Group:
    """A copy that shares nothing with the group."""
    copies = [copy.copy(sample) for sample in group]
    for sample in copies:
        vars(sample).update(copied_value(vars(sample)))
    return copies


def copied_value(value: Any) -> Any:
    """A copy that shares nothing with ``value``: many times as fast as `copy.deepcopy`, for what JSON can hold."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        # A copy first, which nothing interrupts: a hook that was left behind may be adding to it.
        return {key: item if type(item) in _ATOMS else copied_value(item) for key, item in value.copy().items()}
    if kind is list:
        if _ATOMS.issuperset(map(type, value)):  # token ids, thousands of them
            return value.copy()
        return [copied_value(item) for item in value]
    return copy.deepcopy(value)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: all that is made here is kept, and it would walk over it again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plain(group: Group) -> PlainGroup:
    copies = _checked(group) if all(isinstance(sample.status, Status) for sample in group) else None
    if copies is None:
        for sample in group:
            sample.validate()
        return [copied_value(sample.to_dict()) for sample in group]
    for sample in copies:
        sample.status = sample.status.value  # type: ignore[assignment]
    return [vars(sample) for sample in copies]  # these share their keys: half the memory


def _restored(rows: PlainGroup) -> Group:
    samples = _checked(rows) if all(row.keys() <= _FIELDS.keys() for row in rows) else None
    return [Sample.from_dict(copied_value(row)) for row in rows] if samples is None else samples


def _checked(group: Group | PlainGroup) -> Group | None:
    """Copies that share nothing; ``None`` where `Sample.validate` has to look at each."""
    try:
        copies = msgspec.convert(group, list[_Checked], from_attributes=True)
    except msgspec.ValidationError:
        return None
    if not all(map(_has_lengths, copies)):
        return None
    return list(map(_sample, copies))


def _sample(checked: _Checked) -> Sample:
    sample = Sample.__new__(Sample)
    # One by one in the class's order: without a dictionary of its own, it takes less than half the memory.
    for name in _FIELDS:
        value = getattr(checked, name)
        setattr(sample, name, copied_value(value) if name in _UNTYPED else value)
    return sample


def _has_lengths(sample: Sample) -> bool:
    length = sample.response_length
    return (
        0 <= length <= len(sample.tokens)
        and (not sample.weight_versions or len(sample.weight_versions) == length)
        and (sample.loss_mask is None or len(sample.loss_mask) == length)
        and (sample.rollout_log_probs is None or len(sample.rollout_log_probs) == length)
        and (sample.teacher_log_probs is None or len(sample.teacher_log_probs) == length)
        and (sample.kept_tokens is None or is_kept(sample.kept_tokens, length))
        and (sample.routed_experts is None or is_routed(sample.routed_experts, max(len(sample.tokens) - 1, 0)))
    )
