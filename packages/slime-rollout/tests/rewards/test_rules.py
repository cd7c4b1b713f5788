import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_rollout import reward_config
from slime_rollout.rewards.answers import after_hashes, answer_line, answer_tag, last_boxed
from slime_rollout.rewards.choices import multiple_choice
from slime_rollout.rewards.maths import math_equal, read_number
from slime_rollout.rewards.rules import (
    check_label,
    exact,
    find_rule,
    first_integer,
    parse_integer,
    token_f1,
)


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


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The cat sat.", "cat sat", 1.0),
        ("a cat", "the dog", 0.0),
        ("Paris, France", "paris", 2 / 3),
        ("to be or not to be", "to be", 2 * 2 / 8),
        ("yes", "Yes.", 1.0),
        ("yes it is", "yes", 0.0),
        ("no", "yes", 0.0),
        ("noanswer", "nothing", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1(response, label, score):
    assert token_f1(response, label) == pytest.approx(score)


LONG = [
    *("A" * 200_000, "A " * 100_000, "answer: " * 50_000, "answer" + " " * 200_000, "**A(", "$" + "1" * 200_000),
    *("\\text{" * 40_000, " " * 200_000 + "\\text", "####" * 50_000, "#### " + " " * 200_000, "<answer>" * 30_000),
    *("\\boxed " + "1," * 100_000, "\\boxed\\a" + "{1}" * 60_000, "1 " * 100_000, "answer:" + "\n" * 200_000),
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_responses_take_linear_time(text):
    start = time.process_time()
    last_boxed(text)
    after_hashes(text)
    answer_tag(text)
    math_equal(text, text)
    multiple_choice(text, "A", {})
    token_f1(text, "a b c")
    answer_line(text)
    read_number(text)
    assert time.process_time() - start < 5


def score(rule, response, label, metadata=None):
    return find_rule(rule).score(response, label, metadata or {})


def test_every_name_that_the_flag_offers_has_a_rule():
    for name in reward_config.RULES:
        if name != "random" and name not in reward_config.REMOTE_RULES:
            rule = find_rule(name)
            assert rule.score("", "1", {}) == rule.wrong


@pytest.mark.parametrize(
    ("rule", "response", "label", "reward"),
    [
        ("math", r"so \boxed{\frac12}", "0.5", 1.0),
        ("math", r"so \boxed{\frac12}", r"\boxed{0.5}", 1.0),
        ("math", "so 0.5", "0.5", 0.0),
        ("deepscaler", r"\boxed{1}</think>\boxed{2}", "2", 1.0),
        ("deepscaler", r"\boxed{2}</think>2", "2", 0.0),
        ("deepscaler", r"###Response \boxed{2}", "2", 1.0),
        ("deepscaler", r"\boxed{2}", "2", 0.0),
        ("boxed_math", r"\boxed{2}", "2.0", 1.0),
        ("boxed_deepscaler", r"\boxed{2}", "2", 1.0),
        ("dapo", "Answer: $42$", "42", {"score": 1.0, "acc": 1.0}),
        ("dapo", "Answer: 41", "42", {"score": -1.0, "acc": 0.0}),
        ("dapo", r"\boxed{42}", "42", {"score": -1.0, "acc": 0.0}),
        ("boxed_dapo", r"\boxed{42}", "42", {"score": 1.0, "acc": 1.0}),
        ("boxed_dapo", "42", "42", {"score": -1.0, "acc": 0.0}),
        ("f1", "the cat", "cat", 1.0),
        ("boxed_f1", r"dog \boxed{cat}", "cat", 1.0),
        ("gpqa", "The answer is B", "B", 1.0),
        ("boxed_gpqa", r"not A: \boxed{B}", "B", 1.0),
        ("boxed_exact", r"5 \boxed{x}", "x", 1.0),
        ("boxed_first_integer", r"5 \boxed{6}", "6", 1.0),
        ("boxed_dapo", r"\boxed{Answer: 42}", "42", {"score": 1.0, "acc": 1.0}),
        ("gsm8k", "6 * 7\n#### 42", "42", 1.0),
        ("gsm8k", "#### $1,234", "so\n#### 1234", 1.0),
        ("gsm8k", "#### 41", "42", 0.0),
        ("gsm8k", "42", "42", 0.0),
        ("em", "<answer>The Beatles!</answer>", "beatles", 1.0),
        ("em", "<answer>The Beatles of Liverpool</answer>", "beatles", 0.0),
        ("em", "the Beatles", "beatles", 0.0),
        ("boxed_em", r"\boxed{Beatles}", "The Beatles", 1.0),
    ],
)
def test_rules(rule, response, label, reward):
    assert score(rule, response, label) == reward


def test_labels():
    assert check_label("exact", "anything") is None
    assert check_label("first_integer", "42") is None
    assert check_label("random", None) is None
    assert check_label("remote_rm", None) is None
    assert check_label("boxed_remote_rm", None) is None
    assert check_label("dapo", "1,234.5") is None
    assert "no label" in check_label("first_integer", None)
    assert "'4.5' has no integer first" in check_label("boxed_first_integer", "4.5")
    assert "'four' is not a number, which --rm-type dapo" in check_label("dapo", "four")
    assert "the label is empty" in check_label("math", " ")
    assert check_label("gsm8k", "6 * 7 = 42\n#### 42") is None
    assert "is not a number, which --rm-type gsm8k" in check_label("gsm8k", "6 * 7")
