"""Recorded arguments as plain values, and weights of unknown models."""

import pytest

from slime_convert.formats.checkpoint import Weights, plain_arguments
from slime_convert.formats.pickles import Name, Obj


def test_arguments_that_are_no_plain_values_are_left_out():
    args = Obj("argparse Namespace", ())
    lists = [1, "two", 3.0]
    args.state = {"num_layers": 2, "dtype": Name("torch bfloat16"), "freq": lists, "pair": (1, 2), 7: 8}
    args.state |= {"object": Obj("a b", ()), "lists": [lists], "none": None}
    assert plain_arguments(args) == {"num_layers": 2, "dtype": "bfloat16", "freq": lists, "pair": (1, 2)}


@pytest.mark.parametrize("args", [None, 3, [("num_layers", 2)], Obj("a b", ())])
def test_anything_else_has_no_arguments(args):
    assert plain_arguments(args) == {}


def test_a_format_that_says_no_more_knows_nothing():
    weights = Weights()
    assert (weights.tied, weights.shape, weights.arguments, weights.optimizer) == (None, None, {}, ())
    with pytest.raises(NotImplementedError):
        weights.tensor("a")
