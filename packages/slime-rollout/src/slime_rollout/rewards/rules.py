"""The rules by name: how they find answers in responses, and compare them as text, numbers, words or mathematics.

All take time linear in the response's length, except `math_equal`, which may never end.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from slime_core.errors import DataError
from slime_core.interfaces import RewardValue
from slime_rollout.config import REMOTE_RULES, RULES, RolloutConfig

BOXED = "boxed_"
ROW_KEY = "rm_type"
"""Entry of a row's metadata that names its rule, in place of ``--rm-type``."""
Metadata = Mapping[str, Any]

_BOXES = ("\\boxed", "\\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # what a backslash escapes does not count


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``; ``None`` if there is none, or it is not closed."""
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip() not in _BOXES:
        return None
    depth = 0
    for match in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[opening + 1 : match.start()].strip()
    return None


def after_thought(text: str) -> str | None:
    """The text after the last ``</think>``, or else after the last ``###Response``; ``None`` without either."""
    for mark in ("</think>", "###Response"):
        _, found, answer = text.rpartition(mark)
        if found:
            return answer
    return None


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

_DAPO_TAIL = 300  # characters
_ANSWER_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{[^{}]*\}|\\[!,;: ]|\^\s*(?:\{\\circ\}|\\circ)")
_NUMBER = re.compile(r"([-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?)[ ]*(?:%|[A-Za-z][A-Za-z ]*)?\.?")

_LETTERS = string.ascii_uppercase
# A letter before a lower-case word is an article, a pronoun or part of a name ("vitamin C deficiency"), unless the word
# says why it is chosen, or that it is right.
_REASON = r"because|since|as"
_RIGHT = rf"(?:{_REASON}|is|was|must|would|seems|looks|fits)\b(?![ ](?:not|never|wrong|incorrect|false)\b)"
_SAID_LETTER = re.compile(
    rf"(?:answer|choice|option)(?:[ ]is)?[ ]?:?[ ]?[*$]{{0,2}}\(?([A-Z])\b(?![ ](?!(?:{_REASON})\b)[a-z])"
)
_LONE_LETTER = re.compile(rf"\b([A-Z])\b(?!['’]|[ ](?!{_RIGHT})[a-z])")


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


def answer_line(response: str) -> str | None:
    """The text of the last ``Answer: …`` within the last 300 characters; ``None`` without one."""
    found = _ANSWER_LINE.findall(response[-_DAPO_TAIL:])
    return found[-1].strip() if found else None


def same_number(answer: str, label: str) -> bool:
    """Whether an answer is the label's number, without LaTeX, currency, unit and ``x =`` (DAPO)."""
    given, wanted = read_number(answer), read_number(label)
    return given is not None and given == wanted


def read_number(text: str) -> Decimal | None:
    """The number that a text consists of; ``None`` if it is anything else."""
    text = last_boxed(text) or text
    text = _COMMAND.sub("", text).rpartition("=")[2]
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "%").replace("−", "-").strip(" *")
    match = _NUMBER.fullmatch(text)
    if match is None or match[1] in ("", "+", "-"):
        return None
    return Decimal(match[1].replace(",", ""))


def multiple_choice(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """1 if the response chooses the right letter; without a letter, if it holds the right choice's text (GPQA).

    The right letter is ``metadata["correct_letter"]``, or else the label: a letter, an index from 0, or the text of
    one of ``metadata["choices"]`` (a list, a mapping of letters to texts, or ARC's ``label`` and ``text``). The chosen
    letter is the last in a box, or after "answer is", "option" and the like, or else the last that stands alone; it is
    looked for after ``</think>``.
    """
    choices = _choices(metadata.get("choices"))
    right = correct_letter(label, metadata.get("correct_letter"), choices)
    answer = after_thought(response) or response
    usual = max(4, _LETTERS.index(right) + 1) if right else 4
    chosen = _chosen_letter(answer, _LETTERS[: len(choices) or usual])
    if chosen is not None and right is not None:
        return float(chosen == right)
    place = _LETTERS.index(right) if right else len(choices)
    text = choices[place] if place < len(choices) else label
    return float(len(text.strip()) > 1 and text.strip().casefold() in answer.casefold())


def _choices(given: Any) -> list[str]:
    """The choices' texts, in the order of their letters."""
    if not isinstance(given, Mapping):
        return [] if isinstance(given, str) else [str(choice) for choice in given or ()]
    if given.keys() == {"label", "text"}:
        given = dict(zip(given["label"], given["text"], strict=False))
    by_letter = {str(key).strip("() .").upper(): str(text) for key, text in given.items()}
    if not all(len(key) == 1 and key in _LETTERS for key in by_letter):
        return list(by_letter.values())
    return [by_letter.get(letter, "") for letter in _LETTERS[: _LETTERS.index(max(by_letter, default="A")) + 1]]


def correct_letter(label: str, named: str | None, choices: Sequence[str]) -> str | None:
    """The letter of the right choice; ``None`` if it is unknown."""
    label = (named or label).strip()
    letter = label.strip("()").upper()
    if len(letter) == 1 and letter in _LETTERS:
        return letter
    for same in (str.strip, lambda text: text.strip().casefold()):
        texts = [same(choice) for choice in choices]
        if same(label) in texts:
            return _LETTERS[texts.index(same(label))]
    if label.isascii() and label.isdigit() and int(label) < len(_LETTERS):
        return _LETTERS[int(label)]
    return None


def _chosen_letter(answer: str, letters: str) -> str | None:
    boxed = last_boxed(answer)
    if boxed is not None:
        inner = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", boxed).strip(" ().")
        if len(inner) == 1 and inner in letters:
            return inner
    for pattern in (_SAID_LETTER, _LONE_LETTER):
        found = [letter for letter in pattern.findall(_said_in_lower_case(answer)) if letter in letters]
        if found:
            return str(found[-1])
    return None


def _said_in_lower_case(answer: str) -> str:
    return re.sub(r"\b(?:answer|choice|option|is)\b", lambda match: match[0].lower(), answer, flags=re.IGNORECASE)


_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_PLAIN_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
_SCIENTIFIC = re.compile(rf"({_PLAIN_NUMBER})[eE]([-+]?\d+)")
_MIXED = re.compile(r"([-+]?\d+)\s+(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\})")
_LABELLED_TIME = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?: ?[ap]\.?m\.?)?", re.IGNORECASE)
_WORDS_ONLY = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*")


def math_equal(answer: str, label: str) -> bool:
    r"""Whether an answer means what the label says, ``\boxed{…}`` around either aside.

    Equal texts are equal. Words (three letters and more) and times of day are compared as text, case aside, for
    Math-Verify would read ``yes`` as the product e·s·y, and 10:30 as a third. All else is for Math-Verify: numbers to
    six decimals, expressions symbolically, tuples and intervals in order, sets and lists of solutions in any. Raises
    whatever Math-Verify or SymPy does on texts that it cannot take.
    """
    given, wanted = _tidy(answer), _tidy(label)
    if not given or not wanted:
        return False
    if given == wanted:
        return True
    if any(form.fullmatch(text) for form in (_WORDS_ONLY, _LABELLED_TIME) for text in (given, wanted)):
        return given.casefold() == wanted.casefold()
    return _verify(given, wanted)


def _tidy(text: str) -> str:
    """Without box, dollar signs, text commands and a full stop; ``1e3`` and ``1 1/2`` in LaTeX."""
    text = last_boxed(text) or text
    text = _TEXT_COMMAND.sub(r"\1", text).strip().strip("$").strip()
    text = text.removesuffix(".").strip()
    if match := _SCIENTIFIC.fullmatch(text):
        return f"{match[1]} \\times 10^{{{match[2]}}}"
    if match := _MIXED.fullmatch(text):
        return f"{match[1]}\\frac{{{match[2] or match[4]}}}{{{match[3] or match[5]}}}"
    return text


def _verify(given: str, wanted: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own time limits are signals of the main thread; whoever calls has a better one. It warns of that each time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Only the box: its fallback would take the first number of `5 or 6`.
    rules = [LatexExtractionConfig(boxed_match_priority=0)]
    read = [
        parse(f"\\boxed{{{text}}}", rules, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
        for text in (wanted, given)
    ]
    if not all(read):
        return False
    return bool(verify(*read, timeout_seconds=None, raise_on_error=True))


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


def _boxed_after_thought(response: str) -> str | None:
    answer = after_thought(response)
    return None if answer is None else last_boxed(answer)


_DAPO_WRONG: RewardValue = {"score": -1.0, "acc": 0.0}


def _dapo(answer: str, label: str) -> RewardValue:
    return {"score": 1.0, "acc": 1.0} if same_number(answer, label) else _DAPO_WRONG


_RULES = {
    "exact": Rule(exact, instant=True),
    "first_integer": Rule(first_integer, instant=True),
    "math": Rule(math_equal, last_boxed),
    "deepscaler": Rule(math_equal, _boxed_after_thought),
    "dapo": Rule(_dapo, answer_line, wrong=_DAPO_WRONG),
    "f1": Rule(token_f1),
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
        return None if label is None and own else check_label(rule, label)
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
        return f"the label {label!r} is not a number, {compares}"
    if name != "exact" and not label.strip():
        return f"the label is empty, which {source} {rule} cannot compare with"
    return None


def read_reward(value: Any) -> RewardValue | None:
    """A finite number, or some by name, as plain floats; ``None`` for anything else."""
    try:
        if isinstance(value, dict):
            rewards = {str(name): _finite(entry) for name, entry in value.items()}
            return rewards or None
        return _finite(value)
    except Exception:  # `__float__` of a user-defined class may raise anything
        return None


def _finite(value: Any) -> float:
    number = math.nan if isinstance(value, str | bytes) else float(value)
    if not math.isfinite(number):
        raise ValueError
    return number
