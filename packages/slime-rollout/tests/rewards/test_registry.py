import pytest

from slime_rollout import config
from slime_rollout.rewards.registry import check_label, find_rule


def score(rule, response, label, metadata=None):
    return find_rule(rule).score(response, label, metadata or {})


def test_every_name_that_the_flag_offers_has_a_rule():
    for name in config.RULES:
        if name != "random" and name not in config.REMOTE_RULES:
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
    assert "'four' is no number, which --rm-type dapo" in check_label("dapo", "four")
    assert "the label is empty" in check_label("math", " ")
