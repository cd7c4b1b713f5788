"""The outcome of a model's check, for people and as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_convert.progress import aligned


@dataclass(frozen=True)
class Proof:
    """One proof: whether it holds, ``None`` if it was not tried, and a figure or the reason."""

    name: str
    passed: bool | None
    detail: str

    @property
    def outcome(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        return "not run" if self.passed is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a model's check: the tiny model in a few words, and the proofs."""

    model: str
    rows: tuple[Proof, ...]

    @property
    def passed(self) -> bool:
        """Whether no proof failed; one that was not tried does not count."""
        return all(row.passed is not False for row in self.rows)

    def to_text(self) -> str:
        """A table for people; its last line is ``passed`` or ``failed``."""
        table = aligned([(row.name, row.outcome, row.detail) for row in self.rows])
        return f"{self.model}\n\n{table}\n\n{'passed' if self.passed else 'failed'}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [{"name": row.name, "outcome": row.outcome, "detail": row.detail} for row in self.rows]
        return {"passed": self.passed, "model": self.model, "rows": rows}
