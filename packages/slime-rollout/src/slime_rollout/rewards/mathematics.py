"""Whether two mathematical answers are equal, by Math-Verify. Slow on some: call it where it can be stopped."""

from __future__ import annotations

import logging
import re

from slime_rollout.rewards.answers import last_boxed

_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
_SCIENTIFIC = re.compile(rf"({_NUMBER})[eE]([-+]?\d+)")
_MIXED = re.compile(r"([-+]?\d+)\s+(?:(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\})")
_LABELLED_TIME = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?: ?[ap]\.?m\.?)?", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*")


def math_equal(answer: str, label: str) -> bool:
    r"""Whether an answer means what the label says, ``\boxed{…}`` around either aside.

    Equal texts are equal. Words (three letters and more) and times of day are compared as text, case aside, for
    Math-Verify would read ``yes`` as the product e·s·y, and 10:30 as a third. All else is for Math-Verify: numbers to
    six decimals, expressions symbolically, tuples and intervals in order, sets and lists of solutions in any.

    Raises:
        Exception: Whatever Math-Verify or SymPy raises on texts that it cannot take.
    """
    given, wanted = _tidy(answer), _tidy(label)
    if not given or not wanted:
        return False
    if given == wanted:
        return True
    if any(form.fullmatch(text) for form in (_WORDS, _LABELLED_TIME) for text in (given, wanted)):
        return given.casefold() == wanted.casefold()
    return _verify(given, wanted)


def _tidy(text: str) -> str:
    """Without box, dollar signs, text commands and a full stop; ``1e3`` and ``1 1/2`` in LaTeX."""
    text = last_boxed(text) or text
    text = _TEXT.sub(r"\1", text).strip().strip("$").strip()
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
