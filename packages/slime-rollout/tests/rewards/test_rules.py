import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_rollout.rewards.rules import exact, first_integer, parse_integer


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("42", "42", 1), (" 42\n", "42", 1), ("42", " 42 ", 1), ("42.", "42", 0), ("", "42", 0), ("x = 4", "x = 4", 1)],
)
def test_exact(response, label, reward):
    assert exact(response, label) == reward


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        (" 42\n", "42"),
        ("42. Next: 13 + 4", "42"),
        ("the answer is 42, not 43", "42"),
        ("=42", "42"),
        ("+42", "42"),
        ("042", "42"),
        ("000", "0"),
        ("-0", "0"),
        ("-5", "-5"),
        ("−5", "-5"),
        ("= -5", "-5"),
        ("answer:-5", "-5"),
        ("(-5)", "-5"),
        ("- 5 apples", "5"),
        ("a-5", "5"),
        ("12-5", "12"),
        ("(1)-5", "1"),
        ("$-5", "-5"),
        ("1,234", "1234"),
        ("-1,234,567.", "-1234567"),
        ("1,23", "1"),
        ("1,2345", "1"),
        ("12345,678", "12345"),
        ("1, 2, 3", "1"),
        ("x2 = 5", "2"),
        ("1e3", "1"),
        ("...42", "42"),
        ("end.42", "42"),
        ("3.14", None),
        ("42.0", None),
        (".5", None),
        ("-.5", None),
        ("1,234.5", None),
        ("about 41.7, so 42", None),
        ("forty-two", None),
        ("", None),
        ("٤٢", None),
        ("²", None),
    ],
)
def test_which_integer_a_text_begins_with(text, integer):
    assert parse_integer(text) == integer


@given(st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", " {}\n", "It is {}.", "= {} apples, 7 pears"]))
def test_every_integer_is_read_as_itself(number, form):
    assert parse_integer(form.format(number)) == str(number)


def test_more_digits_than_python_converts():
    assert first_integer("1" * 10_000, "1" * 10_000) == 1.0
    assert first_integer("1" * 10_000, "1") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "reward"), [(" 83.", "83", 1), ("84", "83", 0), ("", "83", 0), ("3", "x = 3", 1), ("", "", 0)]
)
def test_first_integer(response, label, reward):
    assert first_integer(response, label) == reward
