import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_rollout import config, reward_config
from slime_rollout.rewards.answers import after_hashes, after_thought, answer_line, answer_tag, last_boxed
from slime_rollout.rewards.choices import index_metadata, multiple_choice
from slime_rollout.rewards.maths import math_equal, read_number, same_number
from slime_rollout.rewards.rules import (
    check_label,
    check_scoring,
    exact,
    find_rule,
    first_integer,
    parse_integer,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} and \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5", None),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxedx{5}", None),
        (r"\boxed 5", "5"),
        (r"so $\boxed5$, not 6", "5"),
        (r"\boxed 42.", "42"),
        (r"\boxed -1,234.5, done", "-1,234.5"),
        (r"\boxed 3/4", "3/4"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\boxed \frac{1}{2} and {3}", r"\frac{1}{2}"),
        (r"\boxed x", "x"),
        (r"\boxed x and {y}", "x"),
        (r"put it in \boxed and be done", None),
        (r"\boxed", None),
        (r"\boxed $", None),
        ("5", None),
        ("\\boxed{5\\", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


def test_a_million_open_braces_take_no_time():
    assert last_boxed("\\boxed" + "{" * 1_000_000) is None
    assert last_boxed("\\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a###Response b###Response c", " b"),
        ("a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("a###Response b", " b"),
        ("a", None),
        ("<think>a", None),
    ],
)
def test_after_thought(text, answer):
    assert after_thought(text) == answer


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


def test_answer_line():
    assert answer_line("Answer: 1\nso\nanswer : 42\n") == "42"
    assert answer_line("Answer: 42" + " " * 300) is None
    assert answer_line("42") is None
    assert answer_line("Answer:\n\n 42\nso") == "42"
    assert answer_line("Answer: 42\nAnswer:\n") == "42"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 1\n#### 2 \n", "2"),
        ("####42", "42"),
        ("### 42", None),
        ("42", None),
        ("####", None),
    ],
)
def test_after_hashes(text, answer):
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Paris </answer>", "Paris"),
        ("<answer>a</answer><answer>b\nc</answer> d", "b\nc"),
        ("<answer>a</answer> or <answer>b", "a"),
        ("</answer>", None),
        ("<answer>a", None),
        ("a", None),
    ],
)
def test_answer_tag(text, answer):
    assert answer_tag(text) == answer


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The answer is B", "B", 1),
        ("The answer is (b).", "B", 0),
        ("Answer: C", "C", 1),
        ("ANSWER: **C**", "c", 1),
        (r"so \boxed{\text{D}}", "D", 1),
        (r"\boxed{(A)}", "A", 1),
        ("<think>maybe A</think>The answer is B.", "B", 1),
        ("<think>The answer is A</think>It is B", "B", 1),
        ("A hydrogen atom, hence B.", "B", 1),
        ("B. A hydrogen atom", "A", 0),
        ("The answer is a matter of B", "B", 1),
        ("I choose C", "C", 1),
        ("C", "2", 1),
        ("D", "2", 0),
        ("Option A, or rather option B", "A", 0),
        ("The answer is J", "J", 1),
        ("The answer is B", "J", 0),
        ("it is water", "water", 1),
        ("it is fire", "water", 0),
        ("", "A", 0),
        ("B is correct.", "B", 1),
        ("B is the correct option", "B", 1),
        ("So B is right", "B", 1),
        ("The answer is B because it is.", "B", 1),
        ("Only C fits the data; B is wrong", "C", 1),
        ("D was ruled out. A is correct, B is not", "A", 1),
        ("Vitamin C deficiency, so D", "D", 1),
        ("D, as in vitamin C deficiency", "D", 1),
        ("A is a letter, and B isn't", "A", 1),
    ],
)
def test_multiple_choice(response, label, score):
    assert multiple_choice(response, label, {}) == score


def test_choices_tell_the_letter():
    choices = {"choices": ["iron", "water", "gold", "air", "fire"]}
    assert multiple_choice("The answer is B", "water", choices) == 1.0
    assert multiple_choice("The answer is C", "water", choices) == 0.0
    assert multiple_choice("The answer is E", "4", choices) == 1.0
    assert multiple_choice("Surely water", "1", choices) == 1.0
    assert multiple_choice("The answer is B", "A", {"correct_letter": "B"}) == 1.0


def test_choices_are_compared_whatever_their_case():
    choices = {"choices": ["London", "Capital of France", "Berlin"]}
    assert multiple_choice("I think the answer is B.", "capital of france", choices) == 1.0
    assert multiple_choice("The answer is B.", "mM", {"choices": ["MM", "mM"]}) == 1.0


@pytest.mark.parametrize(
    "choices",
    [
        {"A": "London", "B": "Paris"},
        {"B": "Paris", "A": "London"},
        {"(a)": "London", "(b)": "Paris"},
        {"label": ["A", "B"], "text": ["London", "Paris"]},
        {"first": "London", "second": "Paris"},
        ("London", "Paris"),
    ],
)
def test_choices_as_a_mapping(choices):
    for label in ("Paris", "paris"):
        assert multiple_choice("Answer: B", label, {"choices": choices}) == 1.0
        assert multiple_choice("Answer: A", label, {"choices": choices}) == 0.0


def test_a_text_is_no_list_of_choices():
    assert multiple_choice("Answer: B", "B", {"choices": "A) London B) Paris"}) == 1.0


def test_a_letter_that_is_left_out_keeps_its_place():
    assert multiple_choice("Answer: C", "Paris", {"choices": {"A": "London", "C": "Paris"}}) == 1.0


def test_a_number_as_a_label_is_an_index_even_where_choices_are_numbers():
    choices = {"choices": ["1", "2", "3", "4"]}
    assert index_metadata(1, choices) == {"correct_letter": "B"}
    assert index_metadata(1.0, choices) == {"correct_letter": "B"}
    assert index_metadata(1, {"valid_letters": ["J", "K"]}) == {"correct_letter": "K"}
    for label, metadata in (("1", choices), (True, choices), (4, choices), (-1, choices), (1, {}), (None, choices)):
        assert index_metadata(label, metadata) == {}
    assert index_metadata(1, choices | {"correct_letter": "C"}) == {}


def test_a_label_beyond_the_choices_is_named():
    config_of_run = config.RolloutConfig.of(
        hf_checkpoint="none", prompt_data="p", rollout_batch_size=1, rm_type="boxed_gpqa"
    )
    for label, metadata in (("4", {"choices": ["a", "b"]}), ("7.0", {"choices": ["1", "2"]})):
        problem = check_scoring(config_of_run, metadata, label)
        assert f"the label {label} is neither an index from 0 to 1 nor the text of a choice" in problem
    for label, metadata in (("1", {"choices": ["a", "b"]}), ("4", {"choices": ["4", "5"]}), ("4", {}), ("gold", {})):
        assert check_scoring(config_of_run, metadata, label) is None


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
