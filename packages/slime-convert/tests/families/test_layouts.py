"""Every layout against its index formula, element by element, on torch's tensors and on lazy ones; and back again.

Notation: G key-value groups, Q query heads per group, E channels per head, K key heads, R value heads per key head,
W channels of an indexer's head, F MLP channels, D trailing channels.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert.errors import WeightError
from slime_convert.families import layouts
from slime_convert.families.layouts import Layout, concat, deinterleave, indexer_rows, interleave, plus_one, split
from slime_convert.files.reading import TensorReader, bytes_of
from slime_convert.files.tensors import LazyTensor

FEW = st.integers(1, 3)
TYPES = st.sampled_from([torch.int16, torch.int32, torch.int64])


@dataclass
class Case:
    """A layout with sizes: the rows of its parts, and where each row of the whole comes from.

    Attributes:
        rows: Of each part.
        source: Part and row of it, for each row of the whole.
    """

    layout: Layout
    rows: list[int]
    sizes: dict[str, int]
    source: list[tuple[int, int]]


@st.composite
def in_order(draw):
    rows = draw(st.lists(FEW, min_size=1, max_size=3))
    source = [(part, row) for part, count in enumerate(rows) for row in range(count)]
    return Case(layouts.IN_ORDER, rows, {}, source)


@st.composite
def grouped_qkv(draw):
    G, Q, E = draw(FEW), draw(FEW), draw(FEW)
    source = []
    for g in range(G):
        for slot in range(Q + 2):
            part, head = (0, g * Q + slot) if slot < Q else (slot - Q + 1, g)
            source += [(part, head * E + e) for e in range(E)]
    return Case(layouts.GROUPED_QKV, [G * Q * E, G * E, G * E], {"groups": G}, source)


@st.composite
def gated_qkv(draw):
    """In Hugging Face a head's gate follows its query; in Megatron a group's gates follow its queries."""
    G, Q, E = draw(FEW), draw(FEW), draw(FEW)
    source = []
    for g in range(G):
        for is_gate in (0, 1):
            for q in range(Q):
                source += [(0, ((g * Q + q) * 2 + is_gate) * E + e) for e in range(E)]
        source += [(part, g * E + e) for part in (1, 2) for e in range(E)]
    sizes = {"groups": G, "heads": G * Q, "query": G * Q * E}
    return Case(layouts.GATED_QKV, [2 * G * Q * E, G * E, G * E], sizes, source)


@st.composite
def linear_attention(draw):
    """As transformers' ``fix_query_key_value_ordering`` takes the two projections apart."""
    K, R, key, value = draw(FEW), draw(FEW), draw(FEW), draw(FEW)
    widths, source = [key, key, R * value, R * value], []
    for section, width in enumerate(widths):
        for head in range(K):
            source += [(0, head * sum(widths) + sum(widths[:section]) + row) for row in range(width)]
    for section in (0, 1):
        source += [(1, head * 2 * R + section * R + row) for head in range(K) for row in range(R)]
    sizes = {
        "linear_key": K * key,
        "linear_value": K * R * value,
        "linear_key_heads": K,
        "linear_value_heads": K * R,
    }
    return Case(layouts.LINEAR_ATTENTION, [K * sum(widths), 2 * K * R], sizes, source)


@st.composite
def indexer(draw, per_head, pairs):
    heads, half = draw(FEW) if per_head else 1, draw(FEW)
    rotated, W, source = 2 * half, 2 * half + draw(st.integers(0, 3)), []
    for head in range(heads):
        source += [(0, head * W + rotated + row) for row in range(W - rotated)]
        if pairs:
            source += [(0, head * W + row) for row in range(rotated)]
        else:
            source += [(0, head * W + first + row) for row in range(half) for first in (0, half)]
    layout = indexer_rows("heads" if per_head else None, pairs=pairs)
    return Case(layout, [heads * W], {"heads": heads, "rotated": rotated}, source)


@st.composite
def paired_rows(draw):
    F = draw(FEW)
    source = [(0, 2 * f + is_up) for is_up in (0, 1) for f in range(F)]
    return Case(layouts.PAIRED_ROWS, [2 * F], {}, source)


CASES = {
    "in order": in_order(),
    "grouped": grouped_qkv(),
    "gated": gated_qkv(),
    "linear attention": linear_attention(),
    "indexer, pairs": indexer(True, True),
    "indexer, halves": indexer(True, False),
    "indexer's one head, pairs": indexer(False, True),
    "indexer's one head, halves": indexer(False, False),
    "pairs": paired_rows(),
}


def lazy(tensor):
    return LazyTensor.made(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), lambda: bytes_of(tensor))


def loaded(tensor: Any):
    if isinstance(tensor, torch.Tensor):
        return tensor
    with TensorReader() as reader:
        return reader.load(tensor)


def numbered(shapes, dtype):
    """Tensors in which no number occurs twice."""
    tensors, first = [], 1
    for shape in shapes:
        count = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + count, dtype=dtype).reshape(shape))
        first += count
    return tensors


def assert_equal(ours, theirs):
    ours = [loaded(tensor) for tensor in ours]
    assert [(tensor.dtype, tensor.shape) for tensor in ours] == [(tensor.dtype, tensor.shape) for tensor in theirs]
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def assert_layout(layout, parts, sizes, whole):
    """Joined they are the whole, and cut it is the parts: on torch's tensors, and on lazy ones."""
    rows = [len(part) for part in parts]
    for form in (lambda tensor: tensor, lazy):
        assert_equal([layout.join([form(part) for part in parts], sizes)], [whole])
        assert_equal(layout.cut(form(whole), rows, sizes), parts)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rows_go_where_the_formula_says(name, data):
    case, dtype = data.draw(CASES[name]), data.draw(TYPES)
    behind = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    parts = numbered([(count, *behind) for count in case.rows], dtype)
    assert sorted(case.source) == [(part, row) for part, count in enumerate(case.rows) for row in range(count)]
    whole = torch.stack([parts[part][row] for part, row in case.source])
    assert_layout(case.layout, parts, case.sizes, whole)


@settings(max_examples=30, deadline=None)
@given(FEW, FEW, TYPES)
def test_columns_change_halves(rows, half, dtype):
    (part,) = numbered([(rows, 2 * half)], dtype)
    whole = torch.stack([part[:, (column + half) % (2 * half)] for column in range(2 * half)], 1)
    assert_layout(layouts.SWAPPED_HALVES, [part], {}, whole)


@settings(max_examples=30, deadline=None)
@given(FEW, FEW, TYPES)
def test_a_matrix_is_transposed(inputs, outputs, dtype):
    (part,) = numbered([(inputs, outputs)], dtype)
    whole = torch.stack([part[:, row] for row in range(outputs)])
    assert_layout(layouts.TRANSPOSED, [part], {}, whole)


@settings(max_examples=30, deadline=None)
@given(FEW, FEW, TYPES)
def test_columns_in_pairs_become_two_blocks_of_rows(D, F, dtype):
    (part,) = numbered([(D, 2 * F)], dtype)
    whole = torch.stack([part[:, 2 * f + is_up] for is_up in (0, 1) for f in range(F)])
    assert_layout(layouts.TRANSPOSED_PAIRS, [part], {}, whole)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(FEW, min_size=1, max_size=3), st.sampled_from([(), (2,)]))
def test_interleaving(blocks, heights, behind):
    parts = numbered([(blocks * height, *behind) for height in heights], torch.int32)
    pieces = [part[b * h : (b + 1) * h] for b in range(blocks) for part, h in zip(parts, heights, strict=True)]
    for form in (lambda tensor: tensor, lazy):
        whole = interleave([form(part) for part in parts], blocks)
        assert_equal([whole], [torch.cat(pieces)])
        assert_equal(deinterleave(whole, [len(part) for part in parts], blocks), parts)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 1))
def test_cutting_along_either_axis(lengths, axis):
    shapes = [(length, 2) if axis == 0 else (2, length) for length in lengths]
    parts = numbered(shapes, torch.int32)
    for form in (lambda tensor: tensor, lazy):
        whole = concat([form(part) for part in parts], axis)
        assert_equal([whole], [torch.cat(parts, axis)])
        assert_equal(split(whole, lengths, axis), parts)


WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(WIDER)), st.binary(min_size=4, max_size=16))
def test_a_norm_less_one_comes_back_bit_by_bit_or_is_refused(dtype, data):
    """Any bits: NaN, infinities, numbers that are tiny beside one, and minus zero, which one less and more is zero."""
    gamma = torch.frombuffer(bytearray(data[: len(data) // 4 * 4]), dtype=dtype)
    less = layouts.LESS_ONE.join([lazy(gamma)], {})
    exact = (gamma.to(WIDER[dtype]) - 1 + 1).to(dtype)
    if bytes(bytes_of(exact)) != bytes(bytes_of(gamma)):
        with pytest.raises(WeightError, match="cannot be stored less one, as Megatron has it, without rounding"):
            loaded(less)
        return
    assert bytes(bytes_of(loaded(less))) == bytes(bytes_of(gamma.to(WIDER[dtype]) - 1))
    back = loaded(plus_one(lazy(loaded(less)), str(dtype).removeprefix("torch.")))
    assert bytes(bytes_of(back)) == bytes(bytes_of(gamma)) and back.dtype == dtype


def test_a_norm_less_one_in_a_training():
    """There the weights are torch's, and in the type of the training."""
    gamma = torch.tensor([0.5, 1.0, 1.25, -2.0], dtype=torch.bfloat16)
    less = layouts.LESS_ONE.join([gamma], {})
    assert torch.equal(less, gamma - 1) and less.dtype == torch.bfloat16
    assert torch.equal(layouts.LESS_ONE.cut(less, [4], {})[0], gamma)
    with pytest.raises(WeightError, match="a norm of type float64 cannot be stored less one; allowed: bfloat16, float"):
        layouts.LESS_ONE.join([lazy(gamma.double())], {})
