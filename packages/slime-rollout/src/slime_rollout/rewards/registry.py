"""The rules by name. Those that may take long are scored in other processes: see `slime_rollout.rewards.pool`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.interfaces import RewardValue
from slime_rollout.rewards.answers import after_thought, last_boxed
from slime_rollout.rewards.mathematics import math_equal
from slime_rollout.rewards.rules import exact, first_integer, parse_integer
from slime_rollout.rewards.text_answers import answer_line, multiple_choice, read_number, same_number, token_f1

BOXED = "boxed_"
Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    r"""How a response is scored.

    Attributes:
        score: Takes response, label and metadata.
        compare: Takes the answer alone, such as the content of ``\boxed{…}``, label and metadata.
        wrong: What a wrong answer gets, and one that could not be scored.
        metadata_keys: Entries of ``sample.metadata`` that take part.
        instant: Linear in the response's length and small: scored in place.
    """

    score: Callable[[str, str, Metadata], RewardValue]
    compare: Callable[[str, str, Metadata], RewardValue]
    wrong: RewardValue = 0.0
    metadata_keys: tuple[str, ...] = ()
    instant: bool = False


def _whole(compare: Callable[[str, str], float], *, instant: bool = False) -> Rule:
    """A rule that compares the whole response."""

    def score(response: str, label: str, metadata: Metadata) -> float:
        return compare(response, label)

    return Rule(score, score, instant=instant)


def _math(answer: str, label: str, metadata: Metadata) -> float:
    return float(math_equal(answer, label))


def _boxed_math(response: str, label: str, metadata: Metadata) -> float:
    answer = last_boxed(response)
    return 0.0 if answer is None else _math(answer, label, metadata)


def _math_after_thought(response: str, label: str, metadata: Metadata) -> float:
    answer = after_thought(response)
    return 0.0 if answer is None else _boxed_math(answer, label, metadata)


_DAPO_WRONG: RewardValue = {"score": -1.0, "acc": 0.0}


def _dapo_answer(answer: str, label: str, metadata: Metadata) -> RewardValue:
    return {"score": 1.0, "acc": 1.0} if same_number(answer, label) else _DAPO_WRONG


def _dapo(response: str, label: str, metadata: Metadata) -> RewardValue:
    answer = answer_line(response)
    return _DAPO_WRONG if answer is None else _dapo_answer(answer, label, metadata)


_RULES = {
    "exact": _whole(exact, instant=True),
    "first_integer": _whole(first_integer, instant=True),
    "math": Rule(_boxed_math, _math),
    "deepscaler": Rule(_math_after_thought, _math),
    "dapo": Rule(_dapo, _dapo_answer, wrong=_DAPO_WRONG),
    "f1": _whole(token_f1),
    "gpqa": Rule(multiple_choice, multiple_choice, metadata_keys=("choices", "correct_letter")),
}


def find_rule(name: str) -> Rule:
    r"""The rule of a name. ``boxed_`` before it compares what the last ``\boxed{…}`` holds."""
    if not name.startswith(BOXED):
        return _RULES[name]
    rule = _RULES[name.removeprefix(BOXED)]

    def score(response: str, label: str, metadata: Metadata) -> RewardValue:
        answer = last_boxed(response)
        return rule.wrong if answer is None else rule.compare(answer, label, metadata)

    return Rule(score, rule.compare, rule.wrong, rule.metadata_keys, rule.instant)


def check_label(rule: str, label: str | None) -> str | None:
    """What is wrong with a label for a rule, as the end of a message; ``None`` if nothing is."""
    if rule in ("random", "remote_rm"):
        return None
    if label is None:
        return f"no label, which --rm-type {rule} compares with; add one to the row, or name its field with --label-key"
    name = rule.removeprefix(BOXED)
    if name == "first_integer" and parse_integer(label) is None:
        return f"the label {label!r} has no integer first, which --rm-type {rule} compares with"
    if name == "dapo" and read_number(label) is None:
        return f"the label {label!r} is no number, which --rm-type {rule} compares with"
    if name != "exact" and not label.strip():
        return f"the label is empty, which --rm-type {rule} cannot compare with"
    return None
