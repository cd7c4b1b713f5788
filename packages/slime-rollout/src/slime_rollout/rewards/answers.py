"""Where the answer stands in a response. All take time linear in its length."""

from __future__ import annotations

_BOXES = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` holds; ``None`` if there is none, or it is not closed."""
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip() not in _BOXES:
        return None
    depth, place = 0, opening
    while place < len(text):
        if text[place] == "\\":
            place += 1  # \{ and \} are no braces
        elif text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : place].strip()
        place += 1
    return None


def after_thought(text: str) -> str | None:
    """What follows the reasoning: after the last ``</think>``, or else the last ``###Response``; ``None`` without."""
    for mark in ("</think>", "###Response"):
        _, found, answer = text.rpartition(mark)
        if found:
            return answer
    return None
