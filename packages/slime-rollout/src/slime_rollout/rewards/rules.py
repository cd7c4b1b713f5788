"""The rules by name: how they find answers in responses, and compare them as text, numbers or words.

`answers` finds them, `choices` and `maths` compare what is longer to compare. All take time linear in the response's
length, except `math_equal`, which may never end.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slime_core.errors import DataError
from slime_core.interfaces import RewardValue
from slime_core.types.checks import NOT_PLAIN, reward_part, scalar
from slime_rollout.config import RolloutConfig
from slime_rollout.reward_config import OTHER_RULES, REMOTE_RULES, RULES, dapo_gives
from slime_rollout.rewards.answers import after_hashes, after_thought, answer_line, answer_tag, last_boxed
from slime_rollout.rewards.choices import METADATA_KEYS, choice_problem, multiple_choice
from slime_rollout.rewards.maths import math_equal, read_number, same_number

BOXED = "boxed_"
ROW_KEY = "rm_type"
"""Entry of a row's metadata that names its rule, in place of ``--rm-type``."""
Metadata = Mapping[str, Any]

# A sign counts when it touches its digits and nothing that could be an operand, unlike those in "5-3" and "a-3".
# Commas belong to a number when they part it into threes. A lone point before digits begins a decimal number, several
# points do not. ASCII digits only.
_FIRST_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-+−])?(?P<point>(?<![\w.])\.)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<fraction>\.[0-9]+)?"
)


def exact(response: str, label: str) -> float:
    """1 if response and label are the same text, white space at both ends aside."""
    return float(response.strip() == label.strip())


def first_integer(response: str, label: str) -> float:
    """1 if the first number of the response is the integer of the label, such as ``42``, ``042`` or ``1,234``.

    A sign counts where it touches the digits and follows no letter, digit or bracket. ``42.0`` is not an integer.
    """
    wanted = parse_integer(label)
    return float(wanted is not None and parse_integer(response) == wanted)


def parse_integer(text: str) -> str | None:
    """The first number of a text in its shortest form, such as ``-42``; ``None`` without one, or with decimals."""
    # Text, not `int`: a model may write more digits than Python converts.
    match = _FIRST_NUMBER.search(text)
    if match is None or match["fraction"] or match["point"]:
        return None
    digits = match["digits"].replace(",", "").lstrip("0") or "0"
    negative = match["sign"] in ("-", "−") and digits != "0"
    return f"-{digits}" if negative else digits


_WHOLE_OR_NOTHING = {"yes", "no", "noanswer"}
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def token_f1(response: str, label: str) -> float:
    """F1 of the words that response and label share (SQuAD: case, punctuation and articles aside).

    ``yes``, ``no`` and ``noanswer`` count only as the whole answer.
    """
    given, wanted = _words(response), _words(label)
    if given != wanted and _WHOLE_OR_NOTHING & {" ".join(given), " ".join(wanted)}:
        return 0.0
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def same_words(answer: str, label: str) -> float:
    """1 if answer and label are the same words (SQuAD's exact match: case, punctuation and articles aside)."""
    return float(_words(answer) == _words(label))


def same_final_number(answer: str, label: str) -> float:
    """1 if the answer is the number of the label, or of the last ``####`` in it (GSM8K's answers end so)."""
    return float(same_number(answer, after_hashes(label) or label))


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a response is scored: ``find`` its answer, then ``compare`` that with the label."""

    compare: Callable[..., RewardValue]  # of the answer and the label; of the metadata too, where it needs some
    find: Callable[[str], str | None] = str
    wrong: RewardValue = 0.0  # also of a response that could not be scored
    metadata_keys: tuple[str, ...] = ()  # entries of the metadata that `compare` needs
    instant: bool = False  # fast whatever the response: scored in place, not in another process

    def score(self, response: str, label: str, metadata: Metadata) -> RewardValue:
        """The reward of a response."""
        answer = self.find(response)
        if answer is None:
            return self.wrong
        return self.compare(answer, label, metadata) if self.metadata_keys else self.compare(answer, label)


_DAPO_WRONG: RewardValue = {"score": -1.0, "acc": 0.0}


def _dapo(answer: str, label: str) -> RewardValue:
    return {"score": 1.0, "acc": 1.0} if same_number(answer, label) else _DAPO_WRONG


_RULES = {
    "exact": Rule(exact, instant=True),
    "first_integer": Rule(first_integer, instant=True),
    "math": Rule(math_equal, last_boxed),
    "deepscaler": Rule(math_equal, lambda response: last_boxed(after_thought(response) or "")),
    "dapo": Rule(_dapo, answer_line, wrong=_DAPO_WRONG),
    "f1": Rule(token_f1),
    "gpqa": Rule(multiple_choice, metadata_keys=METADATA_KEYS),
    "gsm8k": Rule(same_final_number, after_hashes),
    "em": Rule(same_words, answer_tag),
}


def find_rule(name: str) -> Rule:
    r"""The rule of a name. ``boxed_`` before it compares what the last ``\boxed{…}`` holds."""
    rule = _RULES[name.removeprefix(BOXED)]
    if not name.startswith(BOXED):
        return rule

    def find(response: str) -> str | None:
        boxed = last_boxed(response)
        return boxed if boxed is None else rule.find(boxed) or boxed

    return dataclasses.replace(rule, find=find)


def rule_of_row(metadata: Metadata, rule: str) -> str:
    """The rule that a row's metadata names; ``rule`` if it names none."""
    name = metadata.get(ROW_KEY)
    if name is None or name == "":
        return rule
    if name not in RULES:
        raise DataError(f"the metadata's {ROW_KEY} is {name!r}; allowed: {', '.join(RULES)}; {OTHER_RULES}")
    return str(name)


def check_scoring(config: RolloutConfig, metadata: Metadata, label: str | None) -> str | None:
    """Why a row cannot be scored, as the end of a message; ``None`` if it can.

    Without a label and ``--rm-type`` a custom generate function may set the reward itself.
    """
    if config.rewards.rule is None:
        return None
    try:
        rule = rule_of_row(metadata, config.rewards.rule)
    except DataError as error:
        return str(error)
    if rule == config.rewards.rule:
        own = config.sampling.custom_generate_function_path is not None and config.rewards.rm_type is None
        return None if label is None and own else _check_label(rule, label, metadata)
    source = f"the metadata's {ROW_KEY}"
    if rule in REMOTE_RULES and config.rewards.rule not in REMOTE_RULES:
        return f"{source} is {rule}, and no service is known; give --rm-type remote_rm with its --rm-url"
    if rule.removeprefix(BOXED) == "dapo" and config.rewards.reward_key not in ("score", "acc"):
        return f"{source} is {rule}, which {dapo_gives(config.rewards.reward_key)}"
    return _check_label(rule, label, metadata, source)


def _check_label(rule: str, label: str | None, metadata: Metadata, source: str = "--rm-type") -> str | None:
    problem = check_label(rule, label, source)
    if problem is None and label is not None and rule.removeprefix(BOXED) == "gpqa":
        return choice_problem(label, metadata)
    return problem


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
    if name in ("dapo", "gsm8k") and read_number((name == "gsm8k" and after_hashes(label)) or label) is None:
        return f"the label {label!r} is not a number, {compares}"
    if name != "exact" and not label.strip():
        return f"the label is empty, which {source} {rule} cannot compare with"
    return None


_LARGEST = (2 - 2**-23) * 2.0**127  # of float32


def read_reward(value: Any, keys: Collection[str | None] = ()) -> RewardValue | None:
    """A finite number of float32 as a plain float, or parts by name; ``None`` for anything else.

    Of the parts, those that ``keys`` name must be such numbers if they are there, and one must be in any case. Others
    are carried as they are, such as the answer that was found; what JSON cannot hold is left out.
    """
    try:
        if not isinstance(value, dict):
            number = math.nan if isinstance(value, str | bytes) else float(scalar(value))
            return number if abs(number) <= _LARGEST else None  # nor is NaN
        parts = {str(name): _part(entry) for name, entry in value.items()}
        are_finite = {name: isinstance(part, float) and abs(part) <= _LARGEST for name, part in parts.items()}
    except Exception:  # `__float__` of a user-defined class may raise anything
        return None
    if not any(are_finite.values()) or not all(are_finite.get(key or "", True) for key in keys):
        return None
    return {name: part for name, part in parts.items() if part is not NOT_PLAIN}


def _part(entry: Any) -> Any:
    part = reward_part(entry)
    return float(part) if isinstance(part, int | float) else part
