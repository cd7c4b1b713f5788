"""The rules by name. Those that may take long are scored in other processes: see `slime_rollout.rewards.pool`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.interfaces import RewardValue
from slime_rollout.config import REMOTE_RULES, RULES, RolloutConfig
from slime_rollout.rewards.answers import after_thought, last_boxed
from slime_rollout.rewards.mathematics import math_equal
from slime_rollout.rewards.rules import exact, first_integer, parse_integer
from slime_rollout.rewards.text_answers import answer_line, multiple_choice, read_number, same_number, token_f1

BOXED = "boxed_"
ROW_KEY = "rm_type"
"""Entry of a row's metadata that names its rule, in place of ``--rm-type``."""
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


def rule_of_row(metadata: Metadata, rule: str) -> str:
    """The rule that a row's metadata names; ``rule`` if it names none.

    Raises:
        DataError: There is no rule of that name.
    """
    name = metadata.get(ROW_KEY)
    if name is None or name == "":
        return rule
    if name not in RULES:
        raise DataError(f"the metadata's {ROW_KEY} is {name!r}; allowed: {', '.join(RULES)}; or leave it out")
    return str(name)


def check_scoring(config: RolloutConfig, metadata: Metadata, label: str | None) -> str | None:
    """What keeps a row from being scored, as the end of a message; ``None`` if nothing does."""
    if config.rule is None:
        return None
    try:
        rule = rule_of_row(metadata, config.rule)
    except DataError as error:
        return str(error)
    if rule == config.rule:
        return check_label(rule, label)
    source = f"the metadata's {ROW_KEY}"
    if rule in REMOTE_RULES and config.rule not in REMOTE_RULES:
        return f"{source} is {rule}, and no service is known; give --rm-type remote_rm with its --rm-url"
    if rule.removeprefix(BOXED) == "dapo" and config.reward_key not in ("score", "acc"):
        return f"{source} is {rule}, which gives score (1 or -1) and acc (1 or 0); choose one with --reward-key"
    return check_label(rule, label, source)


def check_label(rule: str, label: str | None, source: str = "--rm-type") -> str | None:
    """What is wrong with a label for a rule that ``source`` names, as the end of a message; ``None`` if nothing is."""
    if rule == "random" or rule in REMOTE_RULES:
        return None
    name = rule.removeprefix(BOXED)
    compares = f"which {source} {rule} compares with"
    if label is None:
        return f"no label, {compares}; add one to the row, or name its field with --label-key"
    if name == "first_integer" and parse_integer(label) is None:
        return f"the label {label!r} has no integer first, {compares}"
    if name == "dapo" and read_number(label) is None:
        return f"the label {label!r} is no number, {compares}"
    if name != "exact" and not label.strip():
        return f"the label is empty, which {source} {rule} cannot compare with"
    return None
