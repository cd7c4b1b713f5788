"""The comparison itself: two weights in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from slime_convert.checkpoint import Format, TensorInfo, Weights
from slime_convert.errors import ShapeMismatchError, ToleranceError
from slime_convert.formats import detect
from slime_convert.progress import OnProgress, no_progress
from slime_convert.verify.elements import deviation
from slime_convert.verify.hf_weights import HfWeights
from slime_convert.verify.names import AsHf, shared_output, under_one_naming
from slime_convert.verify.result import Comparison, Difference, Kind, Side, worst_first


def verify(
    left: str | Path,
    right: str | Path,
    *,
    origin_hf_dir: str | Path | None = None,
    bridge: str | None = None,
    tolerance: float | None = None,
    on_progress: OnProgress = no_progress,
) -> Comparison:
    """Compare two checkpoints of any two formats, weight by weight.

    Two Hugging Face directories are compared under their own names, everything else under Hugging Face's; two Megatron
    checkpoints of a model that is not supported, under Megatron's. Quantized weights are expanded, unless both sides
    are quantized in the same way. Optimizer state, the vocabulary's padding, and whether a tied output layer is stored
    make no difference.

    Args:
        left: A checkpoint.
        right: Another.
        origin_hf_dir: A Hugging Face directory with the ``config.json`` of both; needed only if neither side tells the
            model's shape.
        bridge: ``mbridge`` to cut Megatron's weights as it does, instead of by this package's tables; the
            ``config.json`` must then be in ``origin_hf_dir`` or on one side.
        tolerance: Accept absolute differences up to this, whatever the types; ``None`` asks for equal bits and types.
        on_progress: Called after each pair of weights.

    Raises:
        ToleranceError: ``tolerance`` is negative or no number.
        BridgeError: The bridge is unknown or not installed.
        ConvertError: A checkpoint cannot be read, or the shape is needed and unknown.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ToleranceError(f"tolerance {tolerance} must be 0 or more; give the largest difference to accept")
    found = detect(left), detect(right)
    with ExitStack() as stack:
        first, second = (stack.enter_context(side.form.open(side.path)) for side in found)
        first, second = _expanded_alike(first, second, stack)
        sides = under_one_naming(first, second, origin_hf_dir, bridge)
        run = _Run(*sides, tolerance, on_progress)
        run.compare_all()
        return Comparison(
            left=_side(found[0].form, first),
            right=_side(found[1].form, second),
            naming=sides[0].naming,
            tolerance=tolerance,
            num_equal=run.num_equal,
            num_within=run.num_within,
            nbytes=run.done,
            differences=tuple(sorted(run.differences, key=worst_first)),
            notes=tuple(_contradictions(sides)),
        )


class _Run:
    """One comparison under way."""

    def __init__(self, left: Weights, right: Weights, tolerance: float | None, on_progress: OnProgress) -> None:
        self.left, self.right, self.tolerance = left, right, tolerance
        self.on_progress = on_progress
        self.num_equal = self.num_within = self.done = 0
        self.differences: list[Difference] = []

    def compare_all(self) -> None:
        output = shared_output(self.left.naming, self.left, self.right)
        common = self.left.tensors.keys() & self.right.tensors.keys()
        pairs = {name: (name, name) for name in self._in_order() if name in common}
        if output is not None:
            name, embedding = output
            pairs[name] = (name, embedding) if name in self.left.tensors else (embedding, name)
        infos = {name: (self.left.tensors[a], self.right.tensors[b]) for name, (a, b) in pairs.items()}
        same_shape = [name for name, (a, b) in infos.items() if a.shape == b.shape]
        total = sum(infos[name][0].nbytes + infos[name][1].nbytes for name in same_shape)
        self._tell_what_cannot_be_compared(infos)
        self.on_progress(0, total)
        for name in same_shape:
            self._compare(name, self.left.load(pairs[name][0]), self.right.load(pairs[name][1]), infos[name])
            self.done += infos[name][0].nbytes + infos[name][1].nbytes
            self.on_progress(self.done, total)

    def _in_order(self) -> Iterable[str]:
        """Of a side that cuts its weights from larger ones, their order, so that each is read once."""
        return self.right.tensors if isinstance(self.right, AsHf) else self.left.tensors

    def _tell_what_cannot_be_compared(self, infos: dict[str, tuple[TensorInfo, TensorInfo]]) -> None:
        for name, (left, right) in infos.items():
            if left.shape != right.shape:
                self.differences.append(Difference(name, "shape", left, right))
        for name, info in self.left.tensors.items():
            if name not in infos:
                self.differences.append(Difference(name, "missing", info, None))
        for name, info in self.right.tensors.items():
            if name not in infos:
                self.differences.append(Difference(name, "extra", None, info))

    def _compare(self, name: str, left: Tensor, right: Tensor, infos: tuple[TensorInfo, TensorInfo]) -> None:
        found = deviation(left, right)
        same_type = left.dtype == right.dtype
        if not found.num_differing and same_type:
            self.num_equal += 1
        elif self.tolerance is not None and found.max_abs_diff <= self.tolerance:
            self.num_within += 1
        else:
            kind: Kind = "values" if same_type else "dtype"
            self.differences.append(Difference(name, kind, *infos, found.num_differing, found.max_abs_diff))


def _expanded_alike(left: Weights, right: Weights, stack: ExitStack) -> tuple[Weights, Weights]:
    """Quantized weights expanded, unless both sides are quantized in the same way, or both in ways not read here."""
    if isinstance(left, HfWeights) and isinstance(right, HfWeights):
        both_unread = isinstance(left.format, str) and isinstance(right.format, str)
        if left.format == right.format or both_unread:
            return left, right
    left, right = (
        stack.enter_context(side.expanded()) if isinstance(side, HfWeights) and side.format is not None else side
        for side in (left, right)
    )
    return left, right


def _side(form: Format, weights: Weights) -> Side:
    return Side(form.name, weights.directory, weights.storage)


def _contradictions(sides: Iterable[Weights]) -> Iterable[str]:
    """What recorded arguments say against the shape under which the weights were compared."""
    for side in sides:
        if isinstance(side, AsHf):
            from slime_convert.convert import check_args  # with all of `torch.distributed`, which takes seconds

            try:
                check_args(side.expected, side.arguments, side.directory)
            except ShapeMismatchError as error:
                yield f"note: {error}"
