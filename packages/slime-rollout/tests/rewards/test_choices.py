import pytest

from slime_rollout import config
from slime_rollout.rewards.choices import index_metadata, multiple_choice
from slime_rollout.rewards.rules import (
    check_scoring,
)


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
