r"""How rules find the answer in a response: in a box, after the thinking, after ``Answer:``, ``####`` or in a tag.

All take time linear in the response's length.
"""

from __future__ import annotations

import re

_BOXES = ("\\boxed", "\\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # what a backslash escapes does not count
# TeX boxes the next token alone. Whoever writes `\boxed 42` means the number, though, and `\boxed\frac12` the fraction.
_BARE_BOX = re.compile(
    r"\s*([-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?<!,)"
    r"|\\[A-Za-z]+(?:\s*\{[^{}\\]*\}|[ ]?[0-9])*|(?<=\s)[A-Za-z](?![A-Za-z]))"
)

_ANSWER_TAIL = 300  # characters
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_AFTER_HASHES = re.compile(r"####[ ]*([^\n]+)")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}``; ``None`` if there is none, or it is not closed.

    Without braces, as in ``\boxed 42``, ``\boxed7`` and ``\boxed\frac12``, it is the number, letter or command that
    follows.
    """
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    after = start + len(next(box for box in _BOXES if text.startswith(box, start)))
    opening = text.find("{", after)
    if opening < 0 or text[after:opening].strip():
        bare = _BARE_BOX.match(text, after)
        return bare[1] if bare else None
    depth = 0
    for match in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[opening + 1 : match.start()].strip()
    return None


def after_thought(text: str) -> str | None:
    """The text after the last ``</think>``, or else after the first ``###Response``; ``None`` without either."""
    _, found, answer = text.rpartition("</think>")
    if found:
        return answer
    _, found, answer = text.partition("###Response")
    return answer.partition("###Response")[0] if found else None


def answer_line(response: str) -> str | None:
    """The text of the last ``Answer: …`` within the last 300 characters, maybe a line later; ``None`` without one."""
    found = _ANSWER_LINE.findall(response[-_ANSWER_TAIL:])
    return found[-1].strip() if found else None


def after_hashes(text: str) -> str | None:
    """The text of the last line after ``####``, as in GSM8K; ``None`` without one."""
    found = _AFTER_HASHES.findall(text)
    return found[-1].strip() if found else None


def answer_tag(response: str) -> str | None:
    """The content of the last ``<answer>…</answer>``; ``None`` without one."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else response[start + len("<answer>") : end].strip()
