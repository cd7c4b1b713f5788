"""FP8: every figure is computed a second time here, element by element, by the definition of E4M3 and the formulas."""

import bisect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_convert.errors import WeightError
from slime_convert.quantize.numbers import SMALLEST_SCALE, blocks_of, dequantize_fp8, quantize_fp8


def e4m3(code):
    """The number that a byte stands for: sign, four bits of exponent with bias 7, three of fraction, no infinity."""
    exponent, fraction = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    size = 2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8)
    return -size if code & 128 else size


NON_NEGATIVE = [e4m3(code) for code in range(127)]


def nearest_code(number):
    """Round to nearest; of two that are as near, the one with an even last bit."""
    size = abs(float(number))
    above = min(bisect.bisect_left(NON_NEGATIVE, size), 126)
    codes = [above] if above == 0 else [above - 1, above]
    code = min(codes, key=lambda code: (abs(NON_NEGATIVE[code] - size), code % 2))
    return code | 128 if math.copysign(1, number) < 0 else code


def to_bfloat16(number):
    """Round a float32 to the upper half of its bits, ties to even."""
    bits = int(np.float32(number).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)


def codes_of(q):
    return q.view(torch.uint8).tolist()


def by_hand(weight, block):
    """Codes and scales of a weight."""
    values = weight.float().numpy()
    rows, columns = values.shape
    down, across = blocks_of(rows, columns, block)
    codes, scales = [[0] * columns for _ in range(rows)], np.zeros((down, across), np.float32)
    for r in range(down):
        for c in range(across):
            inside = [
                (row, column)
                for row in range(r * block[0], min((r + 1) * block[0], rows))
                for column in range(c * block[1], min((c + 1) * block[1], columns))
            ]
            amax = max(abs(values[place]) for place in inside)
            scales[r, c] = max(np.float32(amax) / np.float32(448), np.float32(SMALLEST_SCALE))
            for row, column in inside:
                codes[row][column] = nearest_code(values[row, column] / scales[r, c])
    return codes, scales.tolist()


def test_the_table_of_e4m3():
    assert max(NON_NEGATIVE) == 448 and sorted(NON_NEGATIVE) == NON_NEGATIVE
    assert NON_NEGATIVE[:3] == [0, 2.0**-9, 2.0**-8] and NON_NEGATIVE[8] == 2.0**-6
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = [code for code in range(256) if code & 127 != 127]
    read = dequantize_fp8(every[finite][None], torch.ones(1, 1), (1, 254), torch.float32)
    assert read.tolist() == [[e4m3(code) for code in finite]]


def test_rounding_is_to_nearest_even_and_does_not_overflow():
    """All numbers of E4M3, all that lie halfway between two, and their neighbours on both sides; 448 makes scale 1."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(NON_NEGATIVE)]
    sizes = np.array(NON_NEGATIVE + middles, np.float32)
    sizes = np.concatenate([sizes, np.nextafter(sizes, np.float32(0)), np.nextafter(sizes, np.float32(448))])
    numbers = torch.from_numpy(np.concatenate([sizes, -sizes]))
    q, scale = quantize_fp8(numbers[None], (1, len(numbers)))
    assert scale.tolist() == [[1.0]]
    assert codes_of(q) == [[nearest_code(number) for number in numbers.tolist()]]
    assert codes_of(q) == [codes_of(numbers.to(torch.float8_e4m3fn))]
    assert not any(code & 127 == 127 for code in codes_of(q)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 9), (3, 13), (9, 2), (8, 12)], ids=str)
def test_codes_and_scales(shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) * 10.0 ** torch.randint(-3, 3, shape)).to(dtype)
    q, scale = quantize_fp8(weight, (4, 4))
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert (codes_of(q), scale.tolist()) == by_hand(weight, (4, 4))


def test_blocks_are_128_by_128_with_smaller_ones_at_the_edges():
    torch.manual_seed(0)
    weight = torch.randn(130, 257).bfloat16()
    q, scale = quantize_fp8(weight)
    assert scale.shape == (2, 3) == blocks_of(130, 257)
    assert (codes_of(q), scale.tolist()) == by_hand(weight, (128, 128))
    columns = weight.T.contiguous().T  # strides make no difference
    assert codes_of(quantize_fp8(columns)[0]) == codes_of(q)


def test_the_largest_element_becomes_448_whatever_it_is():
    sizes = torch.tensor([1e-10, 0.1, 1 / 3, 447.99, 1e5, 3.4e38])[:, None]
    q, scale = quantize_fp8(torch.cat([sizes, -sizes], dim=1), (1, 2))
    assert q.float().tolist() == [[448.0, -448.0]] * 6
    assert scale[:, 0].tolist() == [(np.float32(size) / np.float32(448)).item() for size in sizes[:, 0].tolist()]


def test_a_block_of_zeros_and_one_of_almost_nothing():
    weight = torch.tensor([[0.0, -0.0, 1e-30, -3e-38], [448 * SMALLEST_SCALE, SMALLEST_SCALE, 0.75, 0.0]])
    q, scale = quantize_fp8(weight, (1, 2))
    assert scale.tolist() == [[2.0**-50, 2.0**-50], [2.0**-50, np.float32(0.75) / np.float32(448)]]
    assert q.float().tolist() == [[0, 0, 0, 0], [448, 1, 448, 0]]
    assert dequantize_fp8(q, scale, (1, 2)).tolist() == [[0, 0, 0, 0], [448 * SMALLEST_SCALE, SMALLEST_SCALE, 0.75, 0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad):
    for row, column in itertools.product(range(3), range(5)):
        weight = torch.ones(3, 5)
        weight[row, column] = bad
        with pytest.raises(WeightError, match=r"a\.weight holds a NaN or an infinity"):
            quantize_fp8(weight, (2, 2), name="a.weight")


def test_the_way_back_is_one_product_rounded_once():
    torch.manual_seed(0)
    codes = torch.tensor([[code for code in range(256) if code & 127 != 127]] * 3, dtype=torch.uint8)
    q, scale = codes.view(torch.float8_e4m3fn), torch.rand(2, 26) * 10.0 ** torch.randint(-9, 9, (2, 26))
    products = [
        [np.float32(e4m3(code)) * scale[row // 2, column // 10].numpy() for column, code in enumerate(line)]
        for row, line in enumerate(codes.tolist())
    ]
    assert dequantize_fp8(q, scale, (2, 10), torch.float32).tolist() == [[float(x) for x in line] for line in products]
    assert dequantize_fp8(q, scale, (2, 10)).tolist() == [[float(to_bfloat16(x)) for x in line] for line in products]


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(0, 254), st.integers(0, 254), st.data()
)
def test_bfloat16_there_and_back_and_there_again(rows, columns, seed, one, other, data):
    """From all of bfloat16's range: exponents of a weight lie between two drawn ones, zeros and subnormals included."""
    random = np.random.default_rng(seed)
    exponents = random.integers(min(one, other), max(one, other), (rows, columns), endpoint=True)
    bits = exponents << 7 | random.integers(0, 128, (rows, columns)) | random.integers(0, 2, (rows, columns)) << 15
    bits[random.random((rows, columns)) < 0.1] = 0
    weight = torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    block = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    q, scale = quantize_fp8(weight, block)
    back = dequantize_fp8(q, scale, block)
    q_again, scale_again = quantize_fp8(back, block)
    assert codes_of(q_again) == codes_of(q) and torch.equal(scale_again, scale)
    assert torch.equal(dequantize_fp8(q_again, scale_again, block), back)
    # Three fraction bits, or half the smallest step: 2**-10 of the scale.
    room = torch.maximum(weight.float().abs() * 2.0**-4, scale_of(scale, block, weight) * 2.0**-10) * (1 + 2.0**-6)
    assert bool(((back.float() - weight.float()).abs() <= room).all())


def scale_of(scale, block, weight):
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: weight.shape[0], : weight.shape[1]]


def test_scales_that_do_not_fit_are_refused():
    q, scale = quantize_fp8(torch.ones(3, 5), (2, 2))
    with pytest.raises(
        WeightError, match=r"w has shape \(3, 5\) and scales of shape \(2, 3\); blocks of \(128, 128\) need .* \(1, 1\)"
    ):
        dequantize_fp8(q, scale, name="w")


def test_scales_that_are_whole_numbers_are_refused():
    q, scale = quantize_fp8(torch.ones(3, 5))
    with pytest.raises(WeightError, match=r"w has scales of type torch\.uint8; allowed: floating point"):
        dequantize_fp8(q, scale.view(torch.uint8)[:, :1], name="w")


def test_weights_without_elements():
    for shape in [(0, 5), (3, 0), (0, 0)]:
        q, scale = quantize_fp8(torch.empty(shape), (2, 2))
        assert q.shape == shape and scale.shape == blocks_of(*shape, (2, 2))
        assert dequantize_fp8(q, scale, (2, 2)).shape == shape


def test_a_block_larger_than_any_weight():
    """A config may say so; it must not take memory."""
    weight = torch.linspace(-3, 3, 15).view(3, 5)
    q, scale = quantize_fp8(weight, (3, 5))
    assert torch.equal(dequantize_fp8(q, scale, (10**30, 10**12)), dequantize_fp8(q, scale, (3, 5)))


@pytest.mark.parametrize(
    ("code", "scale"), [(127, 1.0), (255, 1.0), (1, math.nan), (126, 1e38), (56, 3.4028e38), (0, math.inf)]
)
def test_products_that_are_not_finite_are_refused(code, scale):
    """Or are as float32, but have no neighbour in bfloat16."""
    q = torch.tensor([[code]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(
        WeightError, match=r"w (holds a NaN;|times its scales holds .* what torch\.bfloat16 has no room for)"
    ):
        dequantize_fp8(q, torch.tensor([[scale]]), name="w")


@pytest.mark.parametrize(("code", "scale"), [(127, 1.0), (255, 1.0), (126, 1e38), (254, 1e38)])
def test_one_product_that_is_not_finite_is_refused_wherever_it_is(code, scale):
    """In blocks that are read in several passes, among codes that are fine."""
    for row, column in itertools.product(range(5), range(7)):
        codes = torch.full((5, 7), 56, dtype=torch.uint8)
        codes[row, column] = code
        scales = torch.ones(3, 3)
        scales[row // 2, column // 3] = scale
        with pytest.raises(WeightError, match="NaN"):
            dequantize_fp8(codes.view(torch.float8_e4m3fn), scales, (2, 3), name="w")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_scale_that_is_not_finite_is_refused_wherever_it_is(bad):
    codes = torch.full((5, 7), 56, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for row, column in itertools.product(range(3), range(3)):
        scales = torch.ones(3, 3)
        scales[row, column] = bad
        with pytest.raises(WeightError, match="w times its scales holds a NaN, an infinity"):
            dequantize_fp8(codes, scales, (2, 3), name="w")
