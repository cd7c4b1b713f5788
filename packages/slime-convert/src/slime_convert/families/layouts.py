"""The places of Hugging Face tensors inside one Megatron tensor. Pure functions; the two of a pair are inverses.

They move blocks of rows about, and work on torch's tensors as on lazy ones. Notation: G key-value groups, Q query heads
per group, E channels per head, F MLP channels, D trailing channels (hidden size; none for a bias).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slime_convert.errors import WeightError
from slime_convert.files import tensors
from slime_convert.files.reading import bytes_of, computed, read_whole
from slime_convert.files.tensors import ITEM_BYTES, LazyTensor

if TYPE_CHECKING:
    from torch import Tensor

AnyTensor = TypeVar("AnyTensor", "Tensor", LazyTensor)
"""A tensor of torch's, or a lazy one."""

Sizes = Mapping[str, int]
"""Lengths of the dimensions that the tables name."""


def concat(parts: Sequence[AnyTensor], axis: int = 0) -> AnyTensor:
    """Tensors joined along an axis."""
    if isinstance(parts[0], LazyTensor):
        return tensors.concat(parts, axis)
    import torch

    return torch.cat(list(parts), dim=axis)


def split(whole: AnyTensor, lengths: Sequence[int], axis: int = 0) -> list[AnyTensor]:
    """A tensor cut along an axis into parts of some lengths; of torch's, views."""
    if isinstance(whole, LazyTensor):
        return list(tensors.split(whole, lengths, axis))
    import torch

    return list(torch.split(whole, list(lengths), dim=axis))


def interleave(parts: Sequence[Any], blocks: int) -> Any:
    """Tensors cut into as many blocks of rows each: the first block of every one, the second of every one …"""
    rest = parts[0].shape[1:]
    return concat([part.reshape(blocks, -1, *rest) for part in parts], 1).reshape(-1, *rest)


def deinterleave(whole: Any, rows: Sequence[int], blocks: int) -> list[Any]:
    """The inverse of :func:`interleave`, for parts of so many rows."""
    rest = whole.shape[1:]
    cut = split(whole.reshape(blocks, -1, *rest), [number // blocks for number in rows], 1)
    return [part.reshape(number, *rest) for part, number in zip(cut, rows, strict=True)]


@dataclass(frozen=True)
class Layout:
    """A way to join Hugging Face tensors into one Megatron tensor, and to cut it into them again.

    Attributes:
        join: Parts (in the rule's order) and sizes → the Megatron tensor.
        cut: The Megatron tensor, the parts' numbers of rows, and sizes → the parts.
    """

    join: Callable[[Sequence[Any], Sizes], Any]
    cut: Callable[[Any, Sequence[int], Sizes], list[Any]]


IN_ORDER = Layout(lambda parts, _: concat(parts), lambda whole, rows, _: split(whole, rows))
"""Parts one behind the other: one tensor as it is, or the MLP's gate projection (F, D), then its up projection."""

GROUPED_QKV = Layout(
    lambda parts, sizes: interleave(parts, sizes["groups"]),
    lambda whole, rows, sizes: deinterleave(whole, rows, sizes["groups"]),
)
"""Query, key and value projections → per group its queries, its key, its value: (G × (Q + 2) × E, D)."""


def _join_gated_qkv(parts: Sequence[Any], sizes: Sizes) -> Any:
    query_and_gate, key, value = parts
    halves = deinterleave(query_and_gate, [sizes["query"]] * 2, sizes["heads"])
    return interleave([*halves, key, value], sizes["groups"])


def _cut_gated_qkv(whole: Any, rows: Sequence[int], sizes: Sizes) -> list[Any]:
    query, gate, key, value = deinterleave(whole, [sizes["query"]] * 2 + list(rows[1:]), sizes["groups"])
    return [interleave([query, gate], sizes["heads"]), key, value]


GATED_QKV = Layout(_join_gated_qkv, _cut_gated_qkv)
"""Query projection with an output gate, per head (query, gate); key; value → per group its queries, gates, key, value
(megatron-core 0.16, ``attention_output_gate``)."""


def _linear_sections(sizes: Sizes) -> tuple[list[int], list[int]]:
    key, value, heads = sizes["linear_key"], sizes["linear_value"], sizes["linear_value_heads"]
    return [key, key, value, value], [heads, heads]


def _join_linear(parts: Sequence[Any], sizes: Sizes) -> Any:
    pairs = zip(parts, _linear_sections(sizes), strict=True)
    return concat([part for whole, rows in pairs for part in deinterleave(whole, rows, sizes["linear_key_heads"])])


def _cut_linear(whole: Any, _: Sequence[int], sizes: Sizes) -> list[Any]:
    qkvz, ba = _linear_sections(sizes)
    sections = split(whole, qkvz + ba)
    return [interleave(parts, sizes["linear_key_heads"]) for parts in (sections[: len(qkvz)], sections[len(qkvz) :])]


LINEAR_ATTENTION = Layout(_join_linear, _cut_linear)
"""``in_proj_qkvz`` and ``in_proj_ba``, both per key head → all queries, keys, values, z, beta, alpha
(megatron-core 0.16, ``GatedDeltaNet``)."""


def _regroup(whole: Any, before: int, after: int) -> Any:
    """Two halves, interleaved in some blocks of rows each, interleaved in other blocks."""
    half = whole.shape[0] // 2
    return interleave(deinterleave(whole, [half, half], before), after)


def indexer_rows(heads: str | None, *, pairs: bool) -> Layout:
    """Rows of the sparse attention's indexer: per head the rotated channels, then the others → the others first.

    megatron-core up to 0.18 has them in this order, and always rotates neighbouring channels; 0.19 has Hugging Face's.

    Args:
        heads: The dimension that says how many heads there are; ``None`` for one.
        pairs: Hugging Face rotates neighbouring channels, not those half the rotated part apart.
    """

    def lengths(whole: Any, sizes: Sizes) -> tuple[int, int, int]:
        count = sizes[heads] if heads else 1
        rotated = sizes["rotated"] * count
        return count, rotated, whole.shape[0] - rotated

    def join(parts: Sequence[Any], sizes: Sizes) -> Any:
        count, rotated, rest = lengths(parts[0], sizes)
        first, others = deinterleave(parts[0], [rotated, rest], count)
        if not pairs:  # per head x0 … y0 … → x0 y0 x1 y1 …
            first = _regroup(first, count, rotated // 2)
        return interleave([others, first], count)

    def cut(whole: Any, _: Sequence[int], sizes: Sizes) -> list[Any]:
        count, rotated, rest = lengths(whole, sizes)
        others, first = deinterleave(whole, [rest, rotated], count)
        if not pairs:
            first = _regroup(first, rotated // 2, count)
        return [interleave([first, others], count)]

    return Layout(join, cut)


def _of_one(join: Callable[[Any], Any], cut: Callable[[Any], Any]) -> Layout:
    return Layout(lambda parts, _: join(parts[0]), lambda whole, _, __: [cut(whole)])


def _swap_halves(whole: Any) -> Any:
    half = whole.shape[1] // 2
    return concat(split(whole, [half, half], 1)[::-1], 1)


SWAPPED_HALVES = _of_one(_swap_halves, _swap_halves)
"""Columns for (state, embedding) in Hugging Face, for (embedding, state) in Megatron (MiMo's ``input_proj``)."""


def _transposed(matrix: Any) -> Any:
    if isinstance(matrix, LazyTensor):
        return LazyTensor.made(matrix.dtype, matrix.shape[::-1], partial(_transposed_bytes, matrix))
    return matrix.T.contiguous()


def _transposed_bytes(matrix: LazyTensor) -> memoryview:
    import numpy as np  # and not torch, which takes a second to import

    data = np.frombuffer(read_whole(matrix), f"u{ITEM_BYTES[matrix.dtype]}").reshape(matrix.shape)
    return np.ascontiguousarray(data.T).data.cast("B")


TRANSPOSED = _of_one(_transposed, _transposed)
"""A matrix of (inputs, outputs) in Hugging Face."""


def _unpaired(whole: Any) -> Any:
    return _regroup(whole, whole.shape[0] // 2, 1)


def _paired(whole: Any) -> Any:
    return _regroup(whole, 1, whole.shape[0] // 2)


PAIRED_ROWS = _of_one(_unpaired, _paired)
"""Rows that are gate and up in turns → all gates, then all ups (gpt-oss's bias)."""

TRANSPOSED_PAIRS = _of_one(lambda whole: _unpaired(_transposed(whole)), lambda whole: _transposed(_paired(whole)))
"""Columns that are gate and up in turns, of a matrix of (inputs, outputs) → all gates, then all ups, as rows."""

_WIDER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}


def _less_one(whole: Any) -> Any:
    if not isinstance(whole, LazyTensor):
        return whole - 1
    if whole.dtype not in _WIDER:
        raise WeightError(f"a norm of type {whole.dtype} cannot be stored less one; allowed: {', '.join(_WIDER)}")
    return computed(_WIDER[whole.dtype], whole.shape, _exactly_less_one, whole)


def _exactly_less_one(gamma: Tensor) -> Tensor:
    import torch

    less = gamma.to(getattr(torch, _WIDER[str(gamma.dtype).removeprefix("torch.")])) - 1
    if bytes_of((less + 1).to(gamma.dtype)) != bytes_of(gamma):
        why = "it holds a NaN, or a number that is tiny compared with 1"
        raise WeightError(
            f"a norm's weight cannot be stored less one, as Megatron has it, without rounding ({why}); repair the model"
        )
    return less


def plus_one(norm: LazyTensor, dtype: str) -> LazyTensor:
    """A norm's weight from Megatron's, which is less one, rounded once to a type."""

    def add(less: Tensor) -> Tensor:
        import torch

        return (less.to(getattr(torch, _WIDER.get(norm.dtype, norm.dtype))) + 1).to(getattr(torch, dtype))

    return computed(dtype, norm.shape, add, norm)


LESS_ONE = _of_one(_less_one, lambda whole: whole + 1)
"""A norm that Megatron multiplies by one more than its weight, and the model by its weight. It is stored in a wider
type, in which taking one away rounds nothing; lazy ones come back through :func:`plus_one`."""
