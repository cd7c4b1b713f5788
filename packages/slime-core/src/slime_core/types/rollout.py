"""What one round of generation hands on, and how it is written down."""

from __future__ import annotations

import dataclasses

from slime_core.errors import DataError
from slime_core.types import checks
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
    """

    rollout_id: int
    groups: list[Group]
    weight_version: int | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group]

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check the batch's own fields; its samples check themselves.

        Raises:
            DataError: Naming the field and the values.
        """
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

    def to_jsonl(self) -> str:
        """The batch as JSON lines: a head, then a line per sample. See :mod:`slime_core.types.json_lines`.

        Floats survive to the last bit, infinities and NaN (as ``Infinity`` and ``NaN``) included.

        Raises:
            DataError: A field is invalid, or holds a value that would not come back as it is.
        """
        from slime_core.types import json_lines

        return json_lines.batch_lines(self)

    @classmethod
    def from_jsonl(cls, text: str) -> RolloutBatch:
        """The reverse of :meth:`to_jsonl`.

        Raises:
            FormatVersionError: The text is of a format version that this slime does not know.
            DataError: It is cut off, lacks an entry or has one of a wrong type, or has fewer or more samples than its
                head says.
        """
        from slime_core.types import json_lines

        return cls(**json_lines.read_batch_lines(text))

    def to_bytes(self) -> bytes:
        """The batch as bytes: small, quick to read, without pickle. See :mod:`slime_core.types.packed`.

        Raises:
            DataError: A field is invalid, or holds a value that would not come back as it is.
        """
        from slime_core.types import packed

        return packed.pack_batch(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RolloutBatch:
        """The reverse of :meth:`to_bytes`. Executes nothing, whatever the bytes are.

        Raises:
            DamagedError: The bytes were cut off or altered, or are something else.
            FormatVersionError: They are of a format version that this slime does not know.
            DataError: They hold a sample with an invalid field.
        """
        from slime_core.types import packed

        return packed.unpack_batch(data)


@dataclasses.dataclass(kw_only=True)
class EvalReport:
    """Scores on held-out prompts.

    Attributes:
        rollout_id: Rollouts trained on before this evaluation.
        scores: Mean reward of each held-out set.
        metrics: Every number of the sets, scores too, by the name it is tracked under, such as ``eval/<set>-pass@4``.
            See :mod:`slime_core.eval_metrics`.
        samples: The samples of each set.
        seconds: Wall time of the whole evaluation.
    """

    rollout_id: int
    scores: dict[str, float]
    metrics: dict[str, float]
    samples: dict[str, list[Sample]]
    seconds: float
