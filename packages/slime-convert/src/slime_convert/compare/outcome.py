"""The outcome of a comparison, for people and as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.compare.distance import Kind
from slime_convert.files.tensors import TensorInfo
from slime_convert.formats.checkpoint import Naming
from slime_convert.progress import aligned, json_value, printable, shape_text, size_text

_SHOWN = 20  # differences in the table
_ORDER: dict[Kind, int] = {"shape": 0, "missing": 1, "extra": 2, "values": 3, "rounding": 4, "dtype": 5}
_NAMINGS: dict[Naming, str] = {"huggingface": "Hugging Face", "megatron": "Megatron"}


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints; ``storage`` says how it is quantized, if so, and in what form it was compared."""

    format: str
    directory: Path
    storage: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"format": self.format, "directory": str(self.directory), "storage": self.storage}

    def to_text(self) -> str:
        """One line."""
        return printable(f"{self.format} {self.directory}" + (f" ({self.storage})" if self.storage else ""))


@dataclass(frozen=True)
class Difference:
    """A weight that is not the same on both sides.

    Attributes:
        name: The weight.
        kind: ``missing`` (only on the left), ``extra`` (only on the right), ``shape``, ``values``, ``rounding`` (one
            side is the other, rounded to its type), or ``dtype`` (the same values in another type).
        left: Type and shape on the left; ``None`` of an extra weight.
        right: Likewise on the right; ``None`` of a missing weight.
        num_differing: Elements that differ; ``None`` where nothing can be compared element by element.
        max_abs_diff: Largest absolute difference, in float64; infinite if a NaN takes part.
        relative_error: Norm of the difference over the norm of the left side (Frobenius, in float64); infinite if a NaN
            takes part, or where the left side is all zeros.
    """

    name: str
    kind: Kind
    left: TensorInfo | None
    right: TensorInfo | None
    num_differing: int | None = None
    max_abs_diff: float | None = None
    relative_error: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
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
            parts.append(aligned([_HEADER, *map(_row, self.differences[:_SHOWN])]))
        if len(self.differences) > _SHOWN:
            parts.append(f"and {len(self.differences) - _SHOWN} more, which --json lists")
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


_HEADER = ("weight", "outcome", "max abs diff", "relative", "elements", "left", "right")


def _row(difference: Difference) -> tuple[str, ...]:
    sides, number = (difference.left, difference.right), difference.num_differing
    total = next((info.num_elements for info in sides if info), 0)
    shown = ("-" if info is None else f"{info.dtype} {shape_text(info.shape)}" for info in sides)
    errors = (difference.max_abs_diff, difference.relative_error)
    apart = ("" if error is None else f"{error:.3e}" for error in errors)
    return (difference.name, difference.kind, *apart, "" if number is None else f"{number:,} of {total:,}", *shown)


def _plain(difference: Difference) -> dict[str, Any]:
    numbers = {name: json_value(getattr(difference, name)) for name in ("max_abs_diff", "relative_error")}
    return dataclasses.asdict(difference) | numbers
