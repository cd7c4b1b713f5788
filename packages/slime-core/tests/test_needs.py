import pytest

from slime_core.needs import TRAINS, Condition, as_needs, either, given, kind, unless


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (given("use_kl_loss"), "needs --use-kl-loss"),
        (given("use_tis") | given("use_mis"), "needs --use-tis or --use-mis"),
        (given("mis_mode", "clip", "mask"), "needs --mis-mode clip or mask"),
        (unless("advantages"), "not with --advantages"),
        (unless("advantages") | given("use_opd"), "not with --advantages"),
    ],
)
def test_a_need_in_words(need, words):
    assert str(need) == words
    assert need.is_without == words.startswith("not")


def test_many_flags_are_cut_off_and_lists_of_values_are_parted_by_commas():
    assert either([Condition(name) for name in "abcdef"]) == "--a, --b, --c or one of 3 others"
    assert either([Condition("a", (1, 2)), Condition("b")]) == "--a 1 or 2, or --b"


def test_needs_are_one_or_several_or_unsaid():
    assert as_needs(None) is None and as_needs(()) == ()
    assert as_needs(TRAINS) == (TRAINS,) and as_needs([TRAINS, given("a")]) == (TRAINS, given("a"))
    assert TRAINS.kind.missing == "nothing is trained" and given("a").kind is None
    assert kind("trains", "nothing is trained") == TRAINS
