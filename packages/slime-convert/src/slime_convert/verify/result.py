"""What a comparison found, as an object, as text and as JSON. No torch here."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_convert.checkpoint import Naming, TensorInfo
from slime_convert.inspection import aligned, shape_text, size_text
from slime_convert.printable import json_value, printable

Kind = Literal["shape", "missing", "extra", "dtype", "values"]
SHOWN = 20
_ORDER: dict[Kind, int] = {"shape": 0, "missing": 1, "extra": 2, "dtype": 3, "values": 3}
_NAMINGS: dict[Naming, str] = {"huggingface": "Hugging Face", "megatron": "Megatron"}


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        format: Name of its format.
        directory: Where its weights are.
        storage: How they are quantized, and in what form they were compared; ``None`` if they are not quantized.
    """

    format: str
    directory: Path
    storage: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"format": self.format, "directory": str(self.directory), "storage": self.storage}

    def to_text(self) -> str:
        """One line."""
        return f"{self.format} {self.directory}" + (f" ({self.storage})" if self.storage else "")


@dataclass(frozen=True)
class Difference:
    """A weight that is not the same on both sides.

    Attributes:
        name: The weight.
        kind: ``missing`` (only on the left), ``extra`` (only on the right), ``shape``, ``dtype``, or ``values``.
        left: Type and shape on the left; ``None`` of an extra weight.
        right: Likewise on the right; ``None`` of a missing weight.
        num_differing: Elements that differ; ``None`` where nothing can be compared element by element.
        max_abs_diff: Largest absolute difference, in float64; infinite if a NaN takes part.
    """

    name: str
    kind: Kind
    left: TensorInfo | None
    right: TensorInfo | None
    num_differing: int | None = None
    max_abs_diff: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        left: The first checkpoint.
        right: The second.
        naming: Whose names the weights have.
        tolerance: Largest absolute difference that was accepted; ``None`` if bits and types had to be the same.
        num_equal: Weights with equal bits and type.
        num_within: Other weights that the tolerance accepts.
        nbytes: Bytes that were compared, of both sides.
        differences: All others, the worst first.
        notes: What else a reader should know, such as recorded arguments that contradict the config.
    """

    left: Side
    right: Side
    naming: Naming
    tolerance: float | None
    num_equal: int
    num_within: int
    nbytes: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs, within the tolerance."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite difference is the text ``"inf"``, which JSON has no number for."""
        return {
            "equal": self.equal,
            "left": self.left.to_json(),
            "right": self.right.to_json(),
            "naming": self.naming,
            "tolerance": json_value(self.tolerance),
            "counts": self._counts(),
            "bytes": self.nbytes,
            "differences": [_plain(difference) for difference in self.differences],
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        """A table for people: the worst differences and the counts."""
        parts = [f"{self.left.to_text()}\n{self.right.to_text()}"]
        if self.differences:
            parts.append(aligned([_HEADER, *map(_row, self.differences[:SHOWN])]))
        if len(self.differences) > SHOWN:
            parts.append(f"and {len(self.differences) - SHOWN} more, which --json lists")
        parts += map(printable, self.notes)
        counts = ", ".join(f"{number:,} {kind}" for kind, number in self._counts().items() if number)
        verdict = "equal" if self.equal else "different"
        names = f"{size_text(self.nbytes)} compared under {_NAMINGS[self.naming]} names"
        return "\n\n".join([*parts, f"{verdict}: {counts or 'no weights'} ({names})"])

    def _counts(self) -> dict[str, int]:
        kinds = Counter(difference.kind for difference in self.differences)
        return {"equal": self.num_equal, "within tolerance": self.num_within} | {kind: kinds[kind] for kind in _ORDER}


def worst_first(difference: Difference) -> tuple[int, float, str]:
    """A sort key: what cannot be compared at all, then the largest differences."""
    return (_ORDER[difference.kind], -(difference.max_abs_diff or 0.0), difference.name)


_HEADER = ("weight", "outcome", "max abs diff", "elements", "left", "right")


def _row(difference: Difference) -> tuple[str, ...]:
    info = difference.left or difference.right
    total = info.num_elements if info else 0
    return (
        difference.name,
        difference.kind,
        "" if difference.max_abs_diff is None else f"{difference.max_abs_diff:.3e}",
        "" if difference.num_differing is None else f"{difference.num_differing:,} of {total:,}",
        _info_text(difference.left),
        _info_text(difference.right),
    )


def _info_text(info: TensorInfo | None) -> str:
    return "-" if info is None else f"{info.dtype} {shape_text(info.shape)}"


def _plain(difference: Difference) -> dict[str, Any]:
    return dataclasses.asdict(difference) | {"max_abs_diff": json_value(difference.max_abs_diff)}
