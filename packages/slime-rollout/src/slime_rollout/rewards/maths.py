r"""Answers in mathematics: the rule ``dapo`` compares numbers, the rule ``math`` what two texts mean.

What is about LaTeX and units alone is taken off first. It takes time linear in the text's length, except `math_equal`,
which may never end.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from slime_rollout.rewards.answers import last_boxed

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*"
_TEXT_COMMAND = re.compile(_TEXT + r"\{([^{}]*)\}")
_POWER = r"(?:[ ]?\^[ ]?(?:\{[0-9]\}|[0-9]))?"

_COMMAND = re.compile(_TEXT + rf"\{{([^{{}}]*)\}}{_POWER}")
_SET_IN_TEXT = re.compile(r"[-+]?[ ]*[$]?[.]?[0-9]")
_NOT_READ = re.compile(r"\\[!,;: ]|\\l?dots\b|\^\s*(?:\{\\circ\}|\\circ)|<\|[A-Za-z_]+\|>|\"")
_OVERLINE = re.compile(r"\\overline\s*\{([^{}]*)\}")
_FORMULA = re.compile(r"\$([^$]+)\$")
_ARTICLE = re.compile(r"an?[ ]+")
_NUMBER = re.compile(
    r"([-+]?)[ ]*((?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)[ ]*(?:%|[A-Za-z][A-Za-z ]*)?[.,]?"
)


def same_number(answer: str, label: str) -> bool:
    """Whether an answer is the label's number, without LaTeX, currency, unit and ``x =`` (DAPO)."""
    given, wanted = read_number(answer), read_number(label)
    return given is not None and given == wanted


def read_number(text: str) -> Decimal | None:
    r"""The number that a text consists of; ``None`` if it is anything else.

    Of a sentence with formulas, such as ``it is $42$``, the first formula counts.
    """
    text = last_boxed(text) or text
    text = text.rpartition("=")[2].replace("\\$", "")
    if formula := _FORMULA.search(text):
        text = formula[1]
    text = _OVERLINE.sub(r"\1", _COMMAND.sub(_number_in_text, text))
    text = _NOT_READ.sub("", text.replace("{,}", ","))
    text = text.replace("$", "").replace("\\%", "%").replace("−", "-").strip(" *\\")
    article = _ARTICLE.match(text)
    match = _NUMBER.fullmatch(text, article.end() if article else 0)
    if match is None:
        return None
    return Decimal(match[1] + match[2].replace(",", "").replace(" ", ""))


def _number_in_text(command: re.Match[str]) -> str:
    r"""The content of ``\text{42 cm}``; nothing in place of a unit, ``\text{ cm}^2``."""
    return command[1].strip() if _SET_IN_TEXT.match(command[1].strip()) else ""


_PLAIN_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_SCIENTIFIC = re.compile(rf"({_PLAIN_NUMBER})[eE]([-+]?\d+)")
_MIXED = re.compile(r"([-+]?\d+)\s+(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\})")
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:[ ][0-9]{3})+")
_LABELLED_TIME = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?: ?[ap]\.?m\.?)?", re.IGNORECASE)
_WORDS_ONLY = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*")

_SPACES = re.compile(r"\\(?:[,;: ]|q?quad\b)|~|\s")
_WITHOUT_MEANING = re.compile(r"\\!|\\(?:displaystyle|textstyle|bf|rm|it)\b\s*")
_SAME_SIGNS = (("\\varnothing", "\\emptyset"), ("\\degree", "^\\circ"), ("{,}", ","))
# What stands in text after a quantity is its unit, unless it joins quantities, says which half of a day it is, or may
# be a factor: `3\mathrm{i}`, `2\mathrm{AB}`.
_NO_UNIT = r"\s*(?i:and|or|if|for|when|where|to|mod|in[ ]\w+|[ap]\.?\s?m)\b|[A-Za-z]\}|\s*[A-Z]{2,}\s*\}"
_UNIT_IN_TEXT = re.compile(
    r"(?<=[^=<>+*/^({,])\s*\\(?:text|textrm|textit|textnormal|mathrm|mbox)\s*"
    rf"\{{(?!{_NO_UNIT})[^{{}}\d=]*\}}{_POWER}\.?\s*$"
)
_QUANTITY = re.compile(r"[0-9]|\\pi")
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week"),
    *("month", "year", "foot", "feet", "inch", "yard", "km", "mm", "kg", "unit"),
)
_UNIT_IN_WORDS = re.compile(rf"(?<=[\d)}}])[ ]?(?:(?:square|cubic)[ ])?(?:{'|'.join(_UNITS)})(?:es|s)?{_POWER}\.?$")


def math_equal(answer: str, label: str) -> bool:
    r"""Whether an answer means what the label says, ``\boxed{…}`` around either aside.

    Equal texts are equal. Units after a quantity do not count. Words (three letters and more) and times of day are
    compared as text, case aside, for Math-Verify would read ``yes`` as the product e·s·y, and 10:30 as a third. All
    else is for Math-Verify: numbers to six decimals, expressions symbolically, tuples and intervals in order, sets and
    lists of solutions in any. Raises whatever Math-Verify or SymPy does on texts that it cannot take.
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
    """Without box, dollar signs, units, text commands and a full stop; ``1e3`` and ``1 1/2`` in LaTeX."""
    text = last_boxed(text) or text
    text = " ".join(_SPACES.sub(" ", _WITHOUT_MEANING.sub("", text)).split())
    for sign, usual in _SAME_SIGNS:
        text = text.replace(sign, usual)
    text = _without_unit(text.strip("$").strip())
    text = _TEXT_COMMAND.sub(r"\1", text).strip().strip("$").strip()
    text = _without_unit(text.removesuffix(".").strip())
    if match := _SCIENTIFIC.fullmatch(text):
        return f"{match[1]} \\times 10^{{{match[2]}}}"
    if match := _MIXED.fullmatch(text):
        return f"{match[1]}\\frac{{{match[2] or match[4]}}}{{{match[3] or match[5]}}}"
    return text.replace(" ", "") if _THOUSANDS.fullmatch(text) else text


def _without_unit(text: str) -> str:
    r"""Without ``\text{ cm}^2``, or ``cm^2``, at the end of a quantity."""
    for unit in (_UNIT_IN_TEXT, _UNIT_IN_WORDS):
        if (match := unit.search(text)) and _QUANTITY.search(text, 0, match.start()):
            text = text[: match.start()].strip()
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
