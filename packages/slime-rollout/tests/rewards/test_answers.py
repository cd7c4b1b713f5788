import pytest

from slime_rollout.rewards.answers import after_thought, last_boxed


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
        (r"\boxed 5", None),
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
    [("a</think>b", "b"), ("a</think>b</think>c", "c"), ("a###Response b", " b"), ("a", None), ("<think>a", None)],
)
def test_after_thought(text, answer):
    assert after_thought(text) == answer
