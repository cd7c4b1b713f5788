"""``verify``: two checkpoints compared weight by weight, whatever their formats.

Weights are compared block by block, so that none is held as a whole where the two are equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from slime_convert.compare.names import AsHf, shared_weights, under_one_naming
from slime_convert.convert import check_args
from slime_convert.errors import ShapeMismatchError, ToleranceError
from slime_convert.files.reading import TensorReader, are_equal
from slime_convert.files.tensors import LazyTensor, TensorInfo
from slime_convert.formats import detect
from slime_convert.formats.checkpoint import Naming, Weights
from slime_convert.formats.hf import FREQUENCIES, HfWeights
from slime_convert.progress import OnProgress, aligned, json_value, no_progress, printable, shape_text, size_text

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["shape", "missing", "extra", "values", "rounding", "dtype"]
_SLICE, _SHOWN = 2**20, 20  # elements compared at a time, differences in the table
_EXACT = 2.0**52  # differences of integers up to here are exact in float64
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


def _worst_first(difference: Difference) -> tuple[int, float, str]:
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


def verify(
    left: str | Path,
    right: str | Path,
    *,
    origin_hf_dir: str | Path | None = None,
    tolerance: float | None = None,
    on_progress: OnProgress = no_progress,
) -> Comparison:
    """Compare two checkpoints of any two formats, weight by weight.

    Two Hugging Face directories are compared under their own names, everything else under Hugging Face's; two Megatron
    checkpoints of a model that is not supported, under Megatron's. Quantized weights are expanded, unless both sides
    are quantized in the same way. Optimizer state, the vocabulary's padding, and whether a tied output layer or a
    prediction module's copies are stored make no difference.

    Args:
        left: A checkpoint.
        right: Another.
        origin_hf_dir: A Hugging Face directory with the ``config.json`` of both; needed only if neither side tells the
            model's shape.
        tolerance: Accept absolute differences up to this, whatever the types; ``None`` asks for equal bits and types.
        on_progress: Called after each pair of weights.

    Raises:
        ToleranceError: ``tolerance`` is negative or not a number.
        ConvertError: A checkpoint cannot be read, or the shape is needed and unknown.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ToleranceError(f"tolerance {tolerance} must be 0 or more; give the largest difference to accept")
    found = detect(left), detect(right)
    first, second = _expanded_alike(*(side.form.open(side.path) for side in found))
    sides = under_one_naming(first, second, origin_hf_dir)
    run = _Run(*sides, tolerance, on_progress)
    run.compare_all()
    return Comparison(
        left=Side(found[0].form.name, first.directory, first.storage),
        right=Side(found[1].form.name, second.directory, second.storage),
        naming=sides[0].naming,
        tolerance=tolerance,
        num_equal=run.num_equal,
        num_within=run.num_within,
        nbytes=run.done,
        differences=tuple(sorted(run.differences, key=_worst_first)),
        notes=tuple(_notes(sides)),
    )


class _Run:
    """One comparison under way."""

    def __init__(self, left: Weights, right: Weights, tolerance: float | None, on_progress: OnProgress) -> None:
        self.left, self.right, self.tolerance = left, right, tolerance
        self.on_progress = on_progress
        self.num_equal = self.num_within = self.done = 0
        self.differences: list[Difference] = []

    def compare_all(self) -> None:
        left, right = (
            {name: info for name, info in side.tensors.items() if not name.endswith(FREQUENCIES)}
            for side in (self.left, self.right)
        )
        pairs = {name: (name, name) for name in left if name in right}
        for name, original in shared_weights(self.left.naming, self.left, self.right).items():
            pairs[name] = (name, original) if name in left else (original, name)
        common = {name: (left[a], right[b]) for name, (a, b) in pairs.items()}
        self.differences += [Difference(name, "shape", a, b) for name, (a, b) in common.items() if a.shape != b.shape]
        self.differences += [Difference(name, "missing", left[name], None) for name in left if name not in common]
        self.differences += [Difference(name, "extra", None, right[name]) for name in right if name not in common]
        same_shape = {name: a.nbytes + b.nbytes for name, (a, b) in common.items() if a.shape == b.shape}
        total = sum(same_shape.values())
        self.on_progress(0, total)
        for name, nbytes in same_shape.items():
            a, b = pairs[name]
            self._compare(name, self.left.tensor(a), self.right.tensor(b), common[name])
            self.done += nbytes
            self.on_progress(self.done, total)

    def _compare(self, name: str, left: LazyTensor, right: LazyTensor, infos: tuple[TensorInfo, TensorInfo]) -> None:
        if are_equal(left, right):
            self.num_equal += 1
            return
        with TensorReader() as reader:
            found = deviation(reader.load(left), reader.load(right))
            reader.finish()
        if self.tolerance is not None and found.max_abs_diff <= self.tolerance:
            self.num_within += 1
        else:
            far = (found.num_differing, found.max_abs_diff, found.relative_error)
            self.differences.append(Difference(name, found.kind, infos[0], infos[1], *far))


def _expanded_alike(left: Weights, right: Weights) -> tuple[Weights, Weights]:
    """Quantized weights expanded, unless both sides are quantized in the same way, or both in ways not read here."""
    if isinstance(left, HfWeights) and isinstance(right, HfWeights):
        both_unread = isinstance(left.format, str) and isinstance(right.format, str)
        if left.format == right.format or both_unread:
            return left, right
    left, right = (side.expanded() if isinstance(side, HfWeights) else side for side in (left, right))
    return left, right


def _notes(sides: Iterable[Weights]) -> Iterable[str]:
    """Notes on checkpoints, and their recorded arguments that contradict the shape used."""
    for side in sides:
        if isinstance(side, AsHf):
            yield from (f"note: {note}" for note in side.notes)
            try:
                check_args(side.map.shape.to_megatron_args(), side.arguments, side.directory)
            except ShapeMismatchError as error:
                yield f"note: {error}"


class Deviation(NamedTuple):
    """How far two tensors are apart.

    Attributes:
        num_differing: Elements whose bits differ; of tensors with two types, elements whose values differ.
        max_abs_diff: Largest absolute difference, taken in float64. Infinite for a NaN against other bits (with two
            types: against a number), and between unequal infinities.
        relative_error: As of :class:`Difference`.
        kind: What differs: ``values``, ``rounding`` or ``dtype``.
    """

    num_differing: int
    max_abs_diff: float
    relative_error: float = 0.0
    kind: Kind = "values"


def deviation(left: Tensor, right: Tensor) -> Deviation:
    """Compare two tensors of one shape, a slice at a time; those of two types by value."""
    import torch

    types = left.dtype, right.dtype
    if left.is_complex() or right.is_complex():
        left, right = torch.view_as_real(left.to(torch.complex128)), torch.view_as_real(right.to(torch.complex128))
    left, right = left.reshape(-1), right.reshape(-1)
    slices = [_deviation(*both) for both in zip(torch.split(left, _SLICE), torch.split(right, _SLICE), strict=True)]
    number, worst = sum(found.number for found in slices), max((found.largest for found in slices), default=0.0)
    error, norm = math.sqrt(sum(found.squares for found in slices)), math.sqrt(sum(found.of_left for found in slices))
    relative = math.inf if not math.isfinite(worst + error + norm) or (error and not norm) else error / (norm or 1.0)
    rounds = all(found.rounds for found in slices)
    kind: Kind = "values" if types[0] == types[1] or not (number == 0 or rounds) else "rounding" if number else "dtype"
    return Deviation(number, worst, relative, kind)


class _Slice(NamedTuple):
    """Of a slice: elements that differ, the largest difference, the sums of squares of differences and of the left
    side, and whether one side is the other, rounded."""

    number: int
    largest: float
    squares: float
    of_left: float
    rounds: bool


def _deviation(left_N: Tensor, right_N: Tensor) -> _Slice:
    import torch

    if left_N.dtype == right_N.dtype:
        bits = getattr(torch, f"int{8 * left_N.itemsize}")
        differs_N = left_N.view(bits) != right_N.view(bits)
    else:
        left_wide_N, right_wide_N = left_N.double(), right_N.double()
        differs_N = (left_wide_N != right_wide_N) & ~(left_wide_N.isnan() & right_wide_N.isnan())
    of_left = float(left_N.double().nan_to_num(0.0, 0.0, 0.0).square().sum())
    if not differs_N.any():
        return _Slice(0, 0.0, 0.0, of_left, True)
    some_left_N, some_right_N = left_N[differs_N], right_N[differs_N]
    diff_N = _differences(some_left_N, some_right_N).nan_to_num(nan=math.inf, posinf=math.inf)
    rounds = torch.equal(some_left_N.to(some_right_N.dtype), some_right_N) or torch.equal(
        some_right_N.to(some_left_N.dtype), some_left_N
    )
    return _Slice(len(diff_N), float(diff_N.max()), float(diff_N.square().sum()), of_left, rounds)


def _differences(left_N: Tensor, right_N: Tensor) -> Tensor:
    wide_N = (left_N.double() - right_N.double()).abs()
    if left_N.is_floating_point() or right_N.is_floating_point():
        return wide_N
    # float64 rounds long integers, so that neighbours would look equal; an exact difference may overflow instead.
    return (left_N.long() - right_N.long()).double().abs().where(wide_N < _EXACT, wide_N)
