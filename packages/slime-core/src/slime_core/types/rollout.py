"""What one round of generation hands on, and how it is written down."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from slime_core.errors import DataError
from slime_core.types.sample import Group, Sample

FORMAT_VERSION = 1


@dataclasses.dataclass(kw_only=True)
class RolloutBatch:
    """One rollout: finished, scored groups of samples.

    Attributes:
        rollout_id: Number of the rollout, from 0.
        groups: One list of samples per prompt.
        source_state: State of the data source *after* this rollout, as plain values.
        metrics: Named numbers for tracking.
        seconds: Wall time per phase, such as ``generate`` and ``reward``.
    """

    rollout_id: int
    groups: list[Group]
    source_state: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group]

    def to_jsonl(self) -> str:
        """The batch as JSON lines: a head, then a line per sample. Floats survive to the last bit."""
        head = {
            "format_version": FORMAT_VERSION,
            "rollout_id": self.rollout_id,
            "group_sizes": [len(group) for group in self.groups],
            "source_state": self.source_state,
            "metrics": self.metrics,
            "seconds": self.seconds,
        }
        return "".join(json.dumps(row) + "\n" for row in [head, *(sample.to_dict() for sample in self.samples)])

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

    @classmethod
    def from_jsonl(cls, text: str) -> RolloutBatch:
        """The reverse of :meth:`to_jsonl`.

        Raises:
            DataError: The text is cut off, is of another format version, lacks an entry, or has fewer or more samples
                than its head says.
        """
        if not text:
            raise DataError("a rollout file is empty; delete it and generate that rollout again")
        head, *rows = [_parse(line, number) for number, line in enumerate(text.splitlines(), start=1)]
        if head.get("format_version") != FORMAT_VERSION:
            raise DataError(f"rollout format_version {head.get('format_version')!r}; this slime reads {FORMAT_VERSION}")
        try:
            sizes = head["group_sizes"]
            if len(rows) != sum(sizes):
                raise DataError(f"rollout {head['rollout_id']}: {len(rows)} samples, its head says {sum(sizes)}")
            samples = iter([_read_sample(row, number) for number, row in enumerate(rows, start=2)])
            return cls(
                rollout_id=head["rollout_id"],
                groups=[[next(samples) for _ in range(size)] for size in sizes],
                source_state=head["source_state"],
                metrics=head["metrics"],
                seconds=head["seconds"],
            )
        except (KeyError, TypeError) as error:
            raise DataError(
                f"an entry of a rollout file is missing or of a wrong type ({error!r}); generate that rollout again"
            ) from error


def _read_sample(row: dict[str, Any], number: int) -> Sample:
    try:
        return Sample.from_dict(row)
    except DataError as error:
        raise DataError(
            f"line {number} of a rollout file: an entry is missing or of a wrong type or value ({error}); "
            "generate that rollout again"
        ) from error


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"line {number} of a rollout file is not JSON ({error}); generate that rollout again") from None
    if not isinstance(row, dict):
        raise DataError(f"line {number} of a rollout file is no JSON object; generate that rollout again")
    return row


@dataclasses.dataclass(kw_only=True)
class EvalReport:
    """Scores on held-out prompts.

    Attributes:
        rollout_id: Rollouts trained on before this evaluation.
        pass_rates: Mean reward per evaluation set.
        samples: The samples per evaluation set.
        seconds: Wall time of the whole evaluation.
    """

    rollout_id: int
    pass_rates: dict[str, float]
    samples: dict[str, list[Sample]]
    seconds: float
