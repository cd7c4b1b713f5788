"""Words in messages for people: counts with their noun, times, and the names that a misspelt one may mean."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence

_LEAST_SECONDS = 0.05  # less would be shown as 0.0
MOST_CHARACTERS = 10_000
"""Of a line that says what is wrong."""
_SUGGESTIONS = 3  # at most
_ALIKE = 0.72  # how like the name a suggestion must be
_MARGIN = 0.15  # how much less so than the best one


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: ``1 step``, ``2,000 steps``; ``plural`` where an s behind the noun does not do."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """A time in the unit that one reads it in, never as 0.0 of it: ``4.2 s``, ``3.0 min``, ``12.5 h``, ``<0.1 s``."""
    if seconds == 0:
        return "0 s"
    if seconds < _LEAST_SECONDS:
        return "<0.1 s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """``did you mean a, b or c?``, of what is most like ``name``; empty if nothing is."""
    found = suggestions(name, known)
    return f"did you mean {either(found)}?" if found else ""


def either(names: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``: one of these names; there has to be one."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def suggestions(name: str, known: Collection[str]) -> list[str]:
    """The known names, such as flags, that are most like ``name``, best first: at most three, none far from it."""
    dashed = "--" + name.replace("_", "-").lower().strip("-") if name.startswith("-") else name.replace("-", "_")
    if dashed in known:
        return [dashed]
    likeness = ((_likeness(dashed, other), other) for other in _with_like_letters(dashed, known))
    best = sorted((pair for pair in likeness if pair[0] >= _ALIKE), key=lambda pair: (-pair[0], pair[1]))
    return [other for value, other in best[:_SUGGESTIONS] if value >= best[0][0] - _MARGIN]


def _with_like_letters(name: str, known: Collection[str]) -> Iterator[str]:
    """Those whose letters, in any order, let them be like ``name``: few of hundreds."""
    matcher = difflib.SequenceMatcher(None, b=name, autojunk=False)  # counts the letters of its second text once
    for other in known:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE:
            yield other


def _likeness(name: str, other: str) -> float:
    """From 0 to 1: letters in the order that they have, or in the order that their words have when sorted."""
    whole = difflib.SequenceMatcher(None, name, other, autojunk=False)
    words, others = ("-".join(sorted(text.strip("-").split("-"))) for text in (name, other))
    return max(whole.ratio(), 0.98 * difflib.SequenceMatcher(None, words, others, autojunk=False).ratio())


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text with the middle of its very long lines left out: a name in a file that is not one's own has any length."""
    return "\n".join(
        line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}" for line in text.splitlines()
    )
