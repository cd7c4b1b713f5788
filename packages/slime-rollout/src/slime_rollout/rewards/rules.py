"""Rules that compare the text of a response with its label. Each gives 0.0 or 1.0."""

from __future__ import annotations

import re

# A sign counts when it touches its digits and nothing that could be an operand: in "5-3" and "a-3" it is none.
# Commas belong to a number when they part it into threes. A lone point before digits begins a decimal number, several
# points do not. ASCII digits only.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-+−])?(?P<point>(?<![\w.])\.)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<fraction>\.[0-9]+)?"
)


def exact(response: str, label: str) -> float:
    """1 if response and label are the same text, white space at both ends aside."""
    return float(response.strip() == label.strip())


def first_integer(response: str, label: str) -> float:
    """1 if the first number of the response is the integer that the label names.

    ``42``, ``+42``, ``042``, ``= 42.`` and ``1,234`` (for 1234) are integers; so is ``-5`` where the sign touches its
    digits and follows no letter, digit or bracket. A number with decimals (``41.5``, ``42.0``) is none and scores 0.
    """
    wanted = parse_integer(label)
    return float(wanted is not None and parse_integer(response) == wanted)


def parse_integer(text: str) -> str | None:
    """The first number of a text in its shortest form, such as ``-42``; ``None`` if there is none or it has decimals.

    Text, not ``int``: a model may write more digits than Python converts.
    """
    match = _NUMBER.search(text)
    if match is None or match["fraction"] or match["point"]:
        return None
    digits = match["digits"].replace(",", "").lstrip("0") or "0"
    negative = match["sign"] in ("-", "−") and digits != "0"
    return f"-{digits}" if negative else digits
