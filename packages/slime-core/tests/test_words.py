import pytest

from slime_core.words import MOST_CHARACTERS, counted, did_you_mean, duration, either, shortened


@pytest.mark.parametrize(("number", "words"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (2000, "2,000 steps")])
def test_a_count_has_its_noun(number, words):
    assert counted(number, "step") == words


def test_another_plural_is_said():
    assert (counted(1, "reply", "replies"), counted(2, "reply", "replies")) == ("1 reply", "2 replies")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (1e-9, "<0.1 s"), (0.0499, "<0.1 s"), (0.05, "0.1 s"), (4.25, "4.2 s"), (119.9, "119.9 s"),
        (120, "2.0 min"), (7199, "120.0 min"), (7200, "2.0 h"), (3.6e7, "10,000.0 h"),
    ],
)  # fmt: skip
def test_a_time_is_never_shown_as_zero_of_a_unit(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tarin", "did you mean train?"),
        ("train_async", "did you mean train-async?"),
        ("--lr-decay", "did you mean --lr-decay-iters or --lr-decay-style?"),
        ("--colocat", "did you mean --colocate?"),
        ("other", ""),
    ],
)
def test_names_like_a_misspelt_one_are_named(name, words):
    known = ["train", "train-async", "plan", "--colocate", "--lr-decay-iters", "--lr-decay-style"]
    assert did_you_mean(name, known) == words


def test_the_middle_of_a_very_long_line_is_left_out():
    long = f"the name {'x' * 70_000} is unknown; correct it"
    first, second = shortened(f"a line\n{long}").splitlines()
    assert first == "a line" and len(second) == MOST_CHARACTERS + 3
    assert second.startswith("the name xx") and "x … x" in second and second.endswith("is unknown; correct it")


def test_one_of_several_names_is_said_with_or():
    assert [either(names) for names in (["a"], ["a", "b"], ("a", "b", "c"))] == ["a", "a or b", "a, b or c"]
