"""Sets of kept tokens: what a token was sampled from under top-p, top-k or min-p.

As text, so that thousands of sets are one value, which JSON holds: ids in decimal, separated by a space, and a
semicolon after each set. "5 17;5;" are the sets {5, 17} and {5}. A token that no engine sampled has an empty set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from slime_core.errors import DataError


def kept_text(sets: Iterable[Sequence[int]]) -> str:
    """Sets of ids as text."""
    return "".join([" ".join(map(str, ids)) + ";" for ids in sets])


def nothing_kept(count: int) -> str:
    """So many empty sets."""
    return ";" * count


def is_kept(text: str, count: int) -> bool:
    """Whether it may be the text of ``count`` sets; what is in them is not looked at."""
    return text.count(";") == count and (not text or text.endswith(";"))


def check_kept(where: str, text: Any, count: int) -> None:
    """Raise DataError unless it is the text of ``count`` sets. ``where`` says whose, such as ``sample 7``."""
    if not isinstance(text, str):
        raise DataError(f"{where}: kept_tokens must be text such as '5 17;5;', got {type(text).__name__}")
    if not is_kept(text, count):
        raise DataError(f"{where}: kept_tokens has {text.count(';')} sets, each to end with ';', for {count} tokens")
