"""Every figure is computed a second time here, element by element. The words equal those of compressed-tensors 0.18."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_convert.errors import WeightError
from slime_convert.quantize.numbers import dequantize_int4, pack_int4, quantize_int4, unpack_int4


def pack_by_hand(lines):
    """Eight to a word, the first in its lowest bits, each as q + 8; the word as a signed number."""
    words = []
    for line in lines:
        word = [0] * -(-len(line) // 8)
        for column, q in enumerate(line):
            word[column // 8] |= q + 8 << 4 * (column % 8)
        words.append([w - 2**32 if w >= 2**31 else w for w in word])
    return words


def quantize_by_hand(weight, group_size):
    """Whole numbers and scales of a weight."""
    numbers, scales = [], []
    for line in weight.float().numpy():
        groups = [line[start : start + group_size] for start in range(0, len(line), group_size)]
        sizes = torch.tensor([max(abs(x) for x in group) / np.float32(7) for group in groups]).to(weight.dtype)
        sizes = [float(size) or 1.0 for size in sizes]
        # Python rounds to even, as the formula does.
        numbers.append([round(float(x / np.float32(s))) for group, s in zip(groups, sizes, strict=True) for x in group])
        scales.append(sizes)
    return numbers, scales


def test_words():
    numbers = torch.arange(-8, 8, dtype=torch.int8)[None]
    assert [hex(word & 0xFFFFFFFF) for word in pack_int4(numbers)[0].tolist()] == ["0x76543210", "0xfedcba98"]


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_packing_there_and_back(rows, columns, seed):
    numbers = torch.from_numpy(np.random.default_rng(seed).integers(-8, 8, (rows, columns), np.int8))
    packed = pack_int4(numbers)
    assert packed.dtype == torch.int32 and packed.tolist() == pack_by_hand(numbers.tolist())
    assert torch.equal(unpack_int4(packed, columns), numbers)
    assert torch.equal(pack_int4(numbers.T.contiguous().T), packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [32, 128])
def test_numbers_and_scales(group_size, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(5, 256) * 10.0 ** torch.randint(-2, 2, (5, 1))).to(dtype)
    weight[1, 3] = 50  # one that dwarfs its group
    packed, scale = quantize_int4(weight, group_size)
    numbers, scales = quantize_by_hand(weight, group_size)
    assert scale.dtype == dtype and scale.tolist() == scales
    assert packed.tolist() == pack_by_hand(numbers)
    assert {abs(q) for line in numbers for q in line} == set(range(8))


def test_scales_that_float16_has_few_bits_for():
    """1.4 times the smallest float16 becomes 1 of it, and quotients of 9.8 are cut off."""
    tiny = 2.0**-24
    weight = torch.tensor([[10 * tiny, -10 * tiny, 4 * tiny] + [0.0] * 29]).half()
    packed, scale = quantize_int4(weight, 32)
    assert scale.tolist() == [[tiny]] and unpack_int4(packed, 32).tolist() == [[7, -8, 4] + [0] * 29]


def test_strips_of_rows_make_no_difference(monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(7, 64)
    packed, scale = quantize_int4(weight, 32)
    whole = dequantize_int4(packed, scale, 64, 32)
    monkeypatch.setattr("slime_convert.quantize.numbers._STRIP_ELEMENTS", 130)
    again = quantize_int4(weight, 32)
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)
    assert torch.equal(dequantize_int4(packed, scale, 64, 32), whole)


def test_a_group_of_zeros():
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[0, 0] = 7.0
    packed, scale = quantize_int4(weight, 32)
    assert scale.tolist() == [[1, 1], [1, 1]]
    assert torch.equal(dequantize_int4(packed, scale, 64, 32), weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad):
    for row, column in itertools.product(range(3), range(0, 64, 7)):
        weight = torch.ones(3, 64)
        weight[row, column] = bad
        with pytest.raises(WeightError, match=r"a\.weight holds a NaN or an infinity"):
            quantize_int4(weight, 32, name="a.weight")


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(WeightError, match="w has 48 columns, which groups of 32 do not divide"):
        quantize_int4(torch.ones(2, 48), 32, name="w")


def test_scales_that_are_whole_numbers_are_refused():
    packed, scale = quantize_int4(torch.ones(2, 32), 32)
    with pytest.raises(WeightError, match=r"w has scales of type torch\.int32; allowed: floating point"):
        dequantize_int4(packed, scale.view(torch.int32), 32, 32, name="w")


def test_weights_without_elements():
    for shape in [(0, 64), (3, 0)]:
        packed, scale = quantize_int4(torch.empty(shape), 32)
        assert packed.shape == (shape[0], shape[1] // 8) and scale.shape == (shape[0], shape[1] // 32)
        assert dequantize_int4(packed, scale, shape[1], 32).shape == shape


def test_a_group_larger_than_any_row():
    """A config may say so; it must not take memory."""
    packed, scale = quantize_int4(torch.linspace(-3, 3, 32)[None], 32)
    assert torch.equal(dequantize_int4(packed, scale, 32, 10**30), dequantize_int4(packed, scale, 32, 32))


@pytest.mark.parametrize("columns", [64, 40, 37], ids=str)
def test_the_way_back_is_one_product_rounded_once(columns):
    """All of -8 to 7, and a last group and word that are not full."""
    torch.manual_seed(0)
    numbers = torch.randint(-8, 8, (3, columns), dtype=torch.int8)
    scale = (torch.rand(3, -(-columns // 32)) * 10.0 ** torch.randint(-9, 9, (3, 1))).bfloat16()
    products = [
        [np.float32(q) * scale[row, column // 32].float().numpy() for column, q in enumerate(line)]
        for row, line in enumerate(numbers.tolist())
    ]
    packed = torch.tensor(pack_by_hand(numbers.tolist()), dtype=torch.int32)
    wide = dequantize_int4(packed, scale, columns, 32, torch.float32)
    assert wide.tolist() == [[float(x) for x in line] for line in products]
    assert torch.equal(dequantize_int4(packed, scale, columns, 32), torch.tensor(wide.tolist()).bfloat16())


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1), st.integers(-30, 30))
def test_the_same_words_again_after_the_way_back(rows, groups, seed, exponent):
    """The scale may change by its last bit, for a bfloat16 holds seven of them only in part."""
    values = np.random.default_rng(seed).standard_normal((rows, groups * 32)) * 2.0**exponent
    weight = torch.from_numpy(values).bfloat16()
    packed, scale = quantize_int4(weight, 32)
    back = dequantize_int4(packed, scale, groups * 32, 32)
    packed_again, scale_again = quantize_int4(back, 32)
    assert torch.equal(packed_again, packed)
    assert bool(((scale_again.view(torch.int16) - scale.view(torch.int16)).abs() <= 1).all())
    half_steps = scale.float().repeat_interleave(32, 1) * (0.5 + 7 * 2.0**-8)
    assert bool(((back.float() - weight.float()).abs() <= half_steps).all())


def test_parts_that_do_not_fit_are_refused():
    packed, scale = quantize_int4(torch.ones(2, 64), 32)
    with pytest.raises(
        WeightError,
        match=r"w has packed words of shape \(2, 8\) and scales of shape \(2, 2\); 64 .* of 128 need .* \(2, 1\)",
    ):
        dequantize_int4(packed, scale, 64, 128, name="w")
    with pytest.raises(WeightError, match=r"72 columns in groups of 32 need shapes \(2, 9\) and \(2, 3\)"):
        dequantize_int4(packed, scale, 72, 32, name="w")


@pytest.mark.parametrize("scale", [math.nan, math.inf, 3e38])
def test_products_that_are_not_finite_are_refused(scale):
    with pytest.raises(WeightError, match=r"w times its scales holds .* what torch\.bfloat16 has no room for"):
        dequantize_int4(torch.tensor([[0x7F]], dtype=torch.int32), torch.tensor([[scale]]), 8, 32, name="w")
