"""Problems of several checks, which are reported together."""

from __future__ import annotations

import pytest

from slime_core.errors import ConfigError
from slime_launch.errors import PreflightError, Problems, Stopped, about_read


def refuse(text):
    raise ConfigError(text)


def test_all_problems_are_reported_and_each_once():
    problems = Problems(["--lr is bad"])
    assert problems.attempt(refuse, "--lr is bad") is None and problems.attempt(int, "3") == 3
    problems.attempt(refuse, "--seed is bad")
    assert problems.lines == ["--lr is bad", "--seed is bad"]
    with pytest.raises(PreflightError, match=r"^--lr is bad\n--seed is bad$"):
        problems.report()


def test_one_problem_is_raised_as_it_was():
    problems = Problems()
    problems.report()
    problems.attempt(refuse, "--lr is bad")
    with pytest.raises(ConfigError, match=r"^--lr is bad$") as caught:
        problems.report()
    assert type(caught.value) is ConfigError


def test_an_error_in_a_check_counts_unless_values_were_wrong_before():
    with pytest.raises(ZeroDivisionError):
        Problems().attempt(lambda: 1 // 0)
    assert Problems(["--lr is bad"]).attempt(lambda: 1 // 0) is None


def test_flags_that_could_not_be_read_and_settled_names_are_left_out():
    assert about_read(["--lr 1 is large", "--lr-decay-style is bad"], {"lr"}) == ["--lr-decay-style is bad"]
    problems = Problems(unread={"lr"})
    problems.settle("Qwen/None")
    problems.attempt(refuse, "--lr 1 is large\n--load Qwen/None, is not there\n--seed is bad")
    assert problems.lines == ["--seed is bad"]


def test_a_stop_has_the_exit_code_of_a_shell():
    assert Stopped(15).exit_code == 143
