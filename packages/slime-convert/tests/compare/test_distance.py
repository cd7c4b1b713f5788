"""The largest difference, against a plain loop over Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert.compare import deviation, distance
from slime_convert.files.tensors import ITEM_BYTES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def plain(left, right):
    """Count and largest difference of two lists of (bits, value), one by one."""
    count, worst = 0, 0.0
    for (left_bits, a), (right_bits, b) in zip(left, right, strict=True):
        if left_bits == right_bits:
            continue
        count += 1
        worst = max(worst, math.inf if math.isnan(a - b) else abs(a - b))
    return count, worst


def bits_and_values(tensor):
    size = tensor.dtype.itemsize
    raw = bytes(tensor.view(torch.uint8).tolist())
    return [(raw[i * size : (i + 1) * size], float(value)) for i, value in enumerate(tensor)]


@settings(max_examples=150)
@given(st.sampled_from(FLOATS), st.binary(min_size=1, max_size=40), st.data())
def test_one_type_against_a_loop(dtype, data, draw):
    """Any bits at all: numbers, infinities, both zeros, NaNs of any kind."""
    data = data * dtype.itemsize
    other = bytearray(data)
    for index in draw.draw(st.lists(st.integers(0, len(data) * 8 - 1), max_size=4)):
        other[index // 8] ^= 1 << index % 8
    left, right = (torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) for raw in (data, other))
    found = deviation(left, right)
    assert (found.num_differing, found.max_abs_diff) == plain(bits_and_values(left), bits_and_values(right))


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(FLOATS[2:]))
def test_two_types_against_a_loop(values, dtype):
    wide = torch.tensor(values, dtype=torch.float32)
    narrow = wide.to(dtype)
    pairs = list(zip(map(float, wide), map(float, narrow), strict=True))
    differing = [(a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]
    worst = max((math.inf if math.isnan(a - b) else abs(a - b) for a, b in differing), default=0.0)
    for found in (deviation(wide, narrow), deviation(narrow, wide)):
        assert (found.num_differing, found.max_abs_diff) == (len(differing), worst)


def test_what_is_special():
    nan, other_nan = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert nan.isnan() and other_nan.isnan()
    assert deviation(nan, nan.clone()).num_differing == 0
    assert deviation(nan, other_nan).max_abs_diff == math.inf
    assert deviation(nan, torch.zeros(1)).max_abs_diff == math.inf
    assert deviation(nan, nan.double()).num_differing == 0
    infinite = torch.tensor([math.inf])
    assert deviation(infinite, infinite.clone()).num_differing == 0
    assert deviation(infinite, -infinite).max_abs_diff == math.inf
    zeros = deviation(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (zeros.num_differing, zeros.max_abs_diff) == (1, 0.0)


@pytest.mark.parametrize(
    ("left", "right", "worst"),
    [(2**62 + 1, 2**62, 1.0), (-(2**63), 2**63 - 1, 2.0**64), (-3, 4, 7.0), (2**63 - 1, 2**63 - 3, 2.0)],
)
def test_long_integers_are_exact(left, right, worst):
    found = deviation(torch.tensor([left, 5]), torch.tensor([right, 5]))
    assert (found.num_differing, found.max_abs_diff) == (1, worst)


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_every_type_of_a_checkpoint_can_be_compared(name):
    dtype = getattr(torch, name)
    left, right = (
        torch.zeros(3, dtype=torch.uint8).repeat(dtype.itemsize),
        torch.zeros(3 * dtype.itemsize, dtype=torch.uint8),
    )
    right[-1] = 1
    left, right = left.view(dtype), right.view(dtype)
    assert ITEM_BYTES[name] == dtype.itemsize
    assert deviation(left, left.clone()).num_differing == 0
    assert deviation(left, right).num_differing == 1


@settings(max_examples=100)
@given(st.lists(st.tuples(*[st.integers(-(10**7), 10**7).map(lambda number: number / 1e4)] * 2), max_size=12))
def test_the_relative_error_is_that_of_a_loop(pairs):
    left, right = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float64) for side in (0, 1))
    error, norm = math.hypot(*(a - b for a, b in pairs)), math.hypot(*(a for a, _ in pairs))
    expected = error / norm if norm else math.inf if error else 0.0
    assert deviation(left, right).relative_error == pytest.approx(expected, rel=1e-9, abs=1e-150)


@pytest.mark.parametrize(
    ("right", "kind", "relative"),
    [
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "dtype", 0.0),
        (torch.tensor([1.0, 2.0 + 2**-6], dtype=torch.float64).bfloat16(), "values", 2**-6 / math.sqrt(5)),
        (torch.tensor([1.0, 2.0 + 2**-40], dtype=torch.float64), "rounding", 2**-40 / math.sqrt(5)),
        (torch.tensor([1.0, 2.0 + 2**-20]), "values", 2**-20 / math.sqrt(5)),
        (torch.tensor([1.0, math.nan]), "values", math.inf),
    ],
)
def test_each_kind_of_difference_has_one_word(right, kind, relative):
    """fp32 against the same values in another type, rounded to it or from it, and against others."""
    found = deviation(torch.tensor([1.0, 2.0]), right)
    assert (found.kind, found.relative_error) == (kind, pytest.approx(relative))
    if math.isfinite(relative):
        assert deviation(right, torch.tensor([1.0, 2.0])).kind == kind


def test_slices_are_joined(monkeypatch):
    monkeypatch.setattr(distance, "_SLICE", 4)
    left, right = torch.arange(10.0), torch.arange(10.0)
    right[[0, 3, 9]] += torch.tensor([1.0, 5.0, 2.0])
    found = deviation(left.reshape(5, 2).T, right.reshape(5, 2).T)
    assert (found.num_differing, found.max_abs_diff) == (3, 5.0)
    assert found.relative_error == pytest.approx(math.sqrt(30 / 285))
    assert deviation(torch.zeros(0), torch.zeros(0))[:3] == (0, 0.0, 0.0)
    assert deviation(torch.tensor(1.0), torch.tensor(3.0)).max_abs_diff == 2.0
