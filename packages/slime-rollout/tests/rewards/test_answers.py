import pytest

from slime_rollout.rewards.answers import after_hashes, after_thought, answer_line, answer_tag, last_boxed


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
