"""The result of one round of generation, and the file of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from slime_core.errors import DamagedError, DataError
from slime_core.types import checks
from slime_core.types.arrays import SAMPLE_COLUMNS, Columns, columns_of, read_npz, samples_of, write_npz
from slime_core.types.sample import Group, Sample


@dataclasses.dataclass(kw_only=True)
class RolloutBatch:
    """One rollout: finished, scored groups of samples. Checked when it is made and whenever it is written.

    Attributes:
        rollout_id: Number of the rollout, from 0.
        groups: One list of samples per prompt.
        weight_version: Version of the weights that it is to be trained from; ``None`` if unknown.
        metrics: Named numbers for tracking.
        seconds: Wall time per phase, such as ``generate`` and ``reward``.
        dropped: A group that is not trained on for each reason to drop one, for people to look at; not written down.
    """

    rollout_id: int
    groups: list[Group]
    weight_version: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    dropped: dict[str, Group] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group]

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check the batch's own fields; its samples check themselves. Raises DataError, naming the field."""
        self.rollout_id = checks.integer("a rollout", "rollout_id", self.rollout_id, least=0)
        where = f"rollout {self.rollout_id}"
        if not isinstance(self.groups, list) or not all(isinstance(group, list) for group in self.groups):
            raise DataError(f"{where}: groups must be a list of lists of samples, got {type(self.groups).__name__}")
        if strangers := [sample for sample in self.samples if not isinstance(sample, Sample)]:
            raise DataError(f"{where}: groups must hold samples, got {type(strangers[0]).__name__}")
        if self.weight_version is not None:
            self.weight_version = checks.integer(where, "weight_version", self.weight_version, least=0)
        self.metrics = checks.named_numbers(where, "metrics", self.metrics)
        self.seconds = checks.named_numbers(where, "seconds", self.seconds)

    def columns(self) -> RolloutColumns:
        """The same as arrays. Raises DataError if a field is invalid, or a value would not come back as it is."""
        self.validate()
        return RolloutColumns(
            rollout_id=self.rollout_id,
            group_sizes=[len(group) for group in self.groups],
            samples=columns_of(self.samples),
            weight_version=self.weight_version,
            metrics=self.metrics,
            seconds=self.seconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RolloutColumns:
    """A :class:`RolloutBatch` as arrays: what crosses processes and lies on disk. The other attributes are the same.

    Attributes:
        group_sizes: Samples of each group.
        samples: The samples, group by group; see :mod:`slime_core.types.arrays`.
    """

    rollout_id: int
    group_sizes: list[int]
    samples: Columns
    weight_version: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def batch(self) -> RolloutBatch:
        """The same as samples, without extras."""
        samples = iter(samples_of(self.samples))
        fields = {name: getattr(self, name) for name in _HEAD if name != "group_sizes"}
        return RolloutBatch(groups=[[next(samples) for _ in range(size)] for size in self.group_sizes], **fields)

    def write(self, path: str | Path) -> None:
        """Write an ``.npz`` file, which appears whole or not at all. Its directory must exist."""
        write_npz(path, {name: getattr(self, name) for name in _HEAD}, self.samples)

    @classmethod
    def read(cls, path: str | Path) -> RolloutColumns:
        """The reverse of :meth:`write`. Executes nothing, whatever the file is.

        Raises:
            FormatVersionError: The file is in a version of the format that this slime does not know.
            DamagedError: It was cut off or altered, or is something else.
        """
        head, samples = read_npz(path, "a rollout file")
        sizes = head.get("group_sizes")
        if head.keys() != set(_HEAD) or not samples.keys() >= SAMPLE_COLUMNS or not isinstance(sizes, list):
            raise DamagedError("a rollout file lacks some of its entries; generate that rollout again")
        sizes = checks.integers("a rollout file", "group_sizes", sizes, least=0)
        if sum(sizes) != len(samples["index"]):  # type: ignore[arg-type]
            raise DamagedError(
                f"rollout {head['rollout_id']}: {len(samples['index'])} samples, its head says {sum(sizes)}"  # type: ignore[arg-type]
            )
        return cls(**(head | {"group_sizes": sizes}), samples=samples)


_HEAD = tuple(field.name for field in dataclasses.fields(RolloutColumns) if field.name != "samples")


@dataclasses.dataclass(kw_only=True)
class EvalReport:
    """Scores on held-out prompts.

    Attributes:
        rollout_id: Rollouts trained on before this evaluation.
        scores: Mean reward of each held-out set.
        metrics: Every number of the sets, scores too, by the name it is tracked under, such as ``eval/<set>-pass@4``.
            See :mod:`slime_core.metrics`.
        samples: The samples of each set.
        seconds: Wall time of the whole evaluation.
    """

    rollout_id: int
    scores: dict[str, float]
    metrics: dict[str, float]
    samples: dict[str, list[Sample]]
    seconds: float


class Progress(NamedTuple):
    """How far a source of batches is: samples scored, of how many, or a note.

    ``behind`` says whether engines need the current weights; ``silent`` are servers that were asked and do not answer.
    """

    done: int | None = None
    total: int | None = None
    note: str = ""
    behind: bool = False
    silent: tuple[str, ...] = ()


class Account(NamedTuple):
    """The fate of a run's samples so far.

    Attributes:
        counts: Samples ``generated``, and of these ``trained``, ``filtered``, ``aborted``, ``buffered`` and ``out``.
        problem: What does not balance, or ``None``.
    """

    counts: dict[str, int]
    problem: str | None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Train on the group."""


@dataclasses.dataclass(frozen=True)
class Drop:
    """Do not train on the group.

    Attributes:
        reason: A short name; dropped groups are counted by it (``dynamic_filter/drop_<reason>``).
        keep_when_insufficient: Train on it all the same where others would have to be generated in its place.
    """

    reason: str
    keep_when_insufficient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise DataError(f"the reason to drop a group must be a name to count it by, got {self.reason!r}")


Verdict = Keep | Drop
