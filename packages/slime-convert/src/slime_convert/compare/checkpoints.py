"""Two checkpoints compared weight by weight, and block by block: none is held as a whole where the two are equal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime_convert.compare.distance import deviation
from slime_convert.compare.names import AsHf, shared_weights, under_one_naming
from slime_convert.compare.outcome import Comparison, Difference, Side, worst_first
from slime_convert.errors import ShapeMismatchError, ToleranceError
from slime_convert.files.reading import are_equal, load_whole
from slime_convert.files.tensors import LazyTensor, TensorInfo
from slime_convert.formats import detect
from slime_convert.formats.checkpoint import Weights
from slime_convert.formats.hf import FREQUENCIES, HfWeights
from slime_convert.progress import OnProgress, no_progress
from slime_convert.shape import check_args


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
        origin_hf_dir: A Hugging Face directory with the ``config.json`` of both; needed if neither tells the shape.
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
    run = _Comparing(*sides, tolerance, on_progress)
    run.compare_all()
    return Comparison(
        left=Side(found[0].form.name, first.directory, first.storage),
        right=Side(found[1].form.name, second.directory, second.storage),
        naming=sides[0].naming,
        tolerance=tolerance,
        num_equal=run.num_equal,
        num_within=run.num_within,
        nbytes=run.done,
        differences=tuple(sorted(run.differences, key=worst_first)),
        notes=tuple(_notes(sides)),
    )


class _Comparing:
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
        found = deviation(*load_whole(left, right))
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
