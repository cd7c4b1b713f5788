from decimal import Decimal

import pytest

from slime_rollout.rewards.maths import math_equal, read_number, same_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("-1,234.50", "-1234.5"),
        ("$1,234$", "1234"),
        (r"\$42", "42"),
        (r"\boxed{42}", "42"),
        (r"42\text{ cm}", "42"),
        ("42 square units.", "42"),
        ("x = 42", "42"),
        (r"90^\circ", "90"),
        (r"50\%", "50"),
        ("**42**", "42"),
        (".5", "0.5"),
        ("−3", "-3"),
        ("- 3", "-3"),
        (r"\text{42}", "42"),
        (r"\text{42 cm}", "42"),
        (r"42\text{ cm}^2", "42"),
        (r"42\mathrm{cm}^{3}", "42"),
        (r"\textbf{-7}", "-7"),
        ("1{,}234", "1234"),
        ("1 234 567", "1234567"),
        ("42,", "42"),
        ('"42"', "42"),
        ("a 42", "42"),
        ("42<|im_end|>", "42"),
        ("it is $42$ or so", "42"),
        ("$41$ or $42$", "41"),
        ("4 2", None),
        ("12,34", None),
        (r"\text{forty}", None),
        ("an", None),
        ("1,23", None),
        ("41 or 42", None),
        ("forty", None),
        ("", None),
        ("-", None),
    ],
)
def test_read_number(text, number):
    assert read_number(text) == (None if number is None else Decimal(number))


def test_a_decimal_label_is_not_cut_to_an_integer():
    assert same_number("2.5", "2.5")
    assert not same_number("2", "2.5")
    assert same_number("42.0", "42")


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        (r"3\mathrm{i}", "3", False),
        (r"2\mathrm{AB}", "2", False),
        (r"x\text{ is even}", "x", False),
        (r"11:30\text{ PM}", r"11:30\text{ AM}", False),
        (r"16\text{ cm}", r"17\text{ cm}", False),
        (r"5\text{ in}", "5", True),
        ("(1,\n2)", "(1,2)", True),
    ],
)
def test_text_after_a_quantity_is_a_unit_unless_it_says_more(answer, label, equal):
    assert math_equal(answer, label) is equal
