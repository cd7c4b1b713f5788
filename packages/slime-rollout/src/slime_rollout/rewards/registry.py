"""The rules by name, and whether rows can be scored by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.errors import DataError
from slime_core.interfaces import RewardValue
from slime_rollout.config import REMOTE_RULES, RULES, RolloutConfig
from slime_rollout.rewards.rules import (
    after_thought,
    answer_line,
    exact,
    first_integer,
    last_boxed,
    math_equal,
    multiple_choice,
    parse_integer,
    read_number,
    same_number,
    token_f1,
)

BOXED = "boxed_"
ROW_KEY = "rm_type"
"""Entry of a row's metadata that names its rule, in place of ``--rm-type``."""
Metadata = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a response is scored.

    Attributes:
        compare: Takes the answer, the label and the metadata.
        find: Finds the answer in a response; ``None`` if there is none.
        wrong: Reward of a wrong answer, and of one that could not be scored.
        metadata_keys: Entries of ``sample.metadata`` that ``compare`` needs.
        instant: Fast whatever the response: scored in place, not in another process.
    """

    compare: Callable[[str, str, Metadata], RewardValue]
    find: Callable[[str], str | None] = str
    wrong: RewardValue = 0.0
    metadata_keys: tuple[str, ...] = ()
    instant: bool = False

    def score(self, response: str, label: str, metadata: Metadata) -> RewardValue:
        """The reward of a response."""
        answer = self.find(response)
        return self.wrong if answer is None else self.compare(answer, label, metadata)


def _by_label(compare: Callable[[str, str], float]) -> Callable[[str, str, Metadata], float]:
    return lambda answer, label, metadata: float(compare(answer, label))


def _boxed_after_thought(response: str) -> str | None:
    answer = after_thought(response)
    return None if answer is None else last_boxed(answer)


_DAPO_WRONG: RewardValue = {"score": -1.0, "acc": 0.0}


def _dapo(answer: str, label: str, metadata: Metadata) -> RewardValue:
    return {"score": 1.0, "acc": 1.0} if same_number(answer, label) else _DAPO_WRONG


_RULES = {
    "exact": Rule(_by_label(exact), instant=True),
    "first_integer": Rule(_by_label(first_integer), instant=True),
    "math": Rule(_by_label(math_equal), last_boxed),
    "deepscaler": Rule(_by_label(math_equal), _boxed_after_thought),
    "dapo": Rule(_dapo, answer_line, wrong=_DAPO_WRONG),
    "f1": Rule(_by_label(token_f1)),
    "gpqa": Rule(multiple_choice, metadata_keys=("choices", "correct_letter")),
}


def find_rule(name: str) -> Rule:
    r"""The rule of a name. ``boxed_`` before it compares what the last ``\boxed{…}`` holds."""
    rule = _RULES[name.removeprefix(BOXED)]
    return dataclasses.replace(rule, find=last_boxed) if name.startswith(BOXED) else rule


def rule_of_row(metadata: Metadata, rule: str) -> str:
    """The rule that a row's metadata names; ``rule`` if it names none."""
    name = metadata.get(ROW_KEY)
    if name is None or name == "":
        return rule
    if name not in RULES:
        raise DataError(f"the metadata's {ROW_KEY} is {name!r}; allowed: {', '.join(RULES)}; or leave it out")
    return str(name)


def check_scoring(config: RolloutConfig, metadata: Metadata, label: str | None) -> str | None:
    """Why a row cannot be scored, as the end of a message; ``None`` if it can."""
    if config.rewards.rule is None:
        return None
    try:
        rule = rule_of_row(metadata, config.rewards.rule)
    except DataError as error:
        return str(error)
    if rule == config.rewards.rule:
        return check_label(rule, label)
    source = f"the metadata's {ROW_KEY}"
    if rule in REMOTE_RULES and config.rewards.rule not in REMOTE_RULES:
        return f"{source} is {rule}, and no service is known; give --rm-type remote_rm with its --rm-url"
    if rule.removeprefix(BOXED) == "dapo" and config.rewards.reward_key not in ("score", "acc"):
        return f"{source} is {rule}, which gives score (1 or -1) and acc (1 or 0); choose one with --reward-key"
    return check_label(rule, label, source)


def check_label(rule: str, label: str | None, source: str = "--rm-type") -> str | None:
    """Why a label is invalid for a rule that ``source`` names, as the end of a message; ``None`` if it is valid."""
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
