"""A row of a product, and a number of an elementwise function, against the same ones among many others."""

import sys

import pytest
import torch

from slime_rollout.engine.sglang_flags import CPU_SHIMS

MANY = 96
COUNTS = (*range(1, 34), 47, 64, 95)
# K columns of the rows, N of the product: also a head, a router of few experts, and a single score.
SHAPES = [(64, 128), (192, 96), (576, 192), (64, 499), (64, 12), (64, 1), (2048, 48)]


@pytest.fixture(scope="module")
def products():
    sys.path.insert(0, str(CPU_SHIMS))
    try:
        from slime_cpu_shims import products
    finally:
        sys.path.remove(str(CPU_SHIMS))
    return products


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def enabled(request, products, monkeypatch):
    """Torch as in an engine with so many threads."""
    places = {(torch.nn.functional, name) for name in ("linear", "silu", "gelu")}
    for place, name in places | {(torch, name) for name in ("matmul", "bmm", "sigmoid")} | {(torch.Tensor, "sigmoid")}:
        monkeypatch.setattr(place, name, getattr(place, name))  # put back after the test
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    products.rule.cache_clear()
    products.enable()
    yield products
    torch.set_num_threads(before)
    products.rule.cache_clear()


def counts_that_differ(function, rows):
    """For how many of these rows, taken alone, the function gives one other bits than among all."""
    whole = function(rows)
    return [count for count in COUNTS if not function(rows[:count]).equal(whole[:count])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(enabled, shape):
    torch.manual_seed(0)
    columns, width = shape
    rows, weight, bias = torch.randn(MANY, columns), torch.randn(width, columns), torch.randn(width)
    linear = torch.nn.functional.linear
    assert counts_that_differ(lambda rows: linear(rows, weight), rows) == []
    assert counts_that_differ(lambda rows: linear(rows, weight, bias), rows) == []
    assert counts_that_differ(lambda rows: torch.matmul(rows, weight.T), rows) == []
    assert linear(rows[:5], weight, bias).double().allclose(rows[:5].double() @ weight.T.double() + bias, atol=1e-3)


def test_a_row_of_each_head_does_not_depend_on_the_others(enabled):
    torch.manual_seed(0)
    rows, weight = torch.randn(MANY, 4, 48), torch.randn(4, 48, 32)
    assert counts_that_differ(lambda rows: torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1), rows) == []
    into = torch.full((5, 4, 32), float("nan"))
    torch.bmm(rows[:5].transpose(0, 1), weight, out=into.transpose(0, 1))
    assert into.equal(torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1)[:5])


@pytest.mark.parametrize("width", [12, 48, 499, 4864])
def test_a_number_does_not_depend_on_its_place_among_the_others(enabled, width):
    torch.manual_seed(0)
    rows = torch.randn(MANY, 2 * width)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    for function in (silu, gelu, lambda part: gelu(part, approximate="tanh"), torch.sigmoid, torch.Tensor.sigmoid):
        assert counts_that_differ(function, rows[:, :width].contiguous()) == []
        assert counts_that_differ(lambda rows, of=function: of(rows[:, :width]), rows) == []
    assert torch.sigmoid(rows[:3]).double().allclose(1 / (1 + (-rows[:3].double()).exp()), atol=1e-6)


def test_other_shapes_and_types_are_left_as_they_are(enabled):
    torch.manual_seed(0)
    one, weight = torch.randn(64), torch.randn(32, 64)
    assert torch.nn.functional.linear(one, weight).shape == (32,)
    assert torch.nn.functional.linear(one.expand(2, 3, 64), weight).shape == (2, 3, 32)
    assert torch.matmul(torch.randn(2, 3, 5), torch.randn(5, 4)).shape == (2, 3, 4)
    assert torch.nn.functional.linear(torch.empty(0, 64), weight).shape == (0, 32)
    assert torch.nn.functional.silu(one.double()).dtype == torch.float64
    assert torch.nn.functional.silu(torch.empty(0)).shape == (0,)


def test_where_no_multiple_helps_it_is_said_and_nothing_is_padded(products, monkeypatch, caplog):
    monkeypatch.setattr(products.torch, "equal", lambda *_: False)
    products.rule.cache_clear()
    assert products.missing(3, 64, torch.float32) == 0
    assert "the last bits of log-probs may depend" in caplog.text
    products.rule.cache_clear()
