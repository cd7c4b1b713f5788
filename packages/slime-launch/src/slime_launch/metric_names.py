"""Every metric that a run writes: what it is, when it is there, and what upstream slime calls it.

The table is ``metric_names.toml``; `docs/reference/metrics.md` is written from it.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

SECTIONS = ("train", "rollout", "perf", "eval")
PLACES = {
    "side": "low|high|dual",
    "k": r"k[123]|\d+",
    "spread": "mean|std|ess|min|max",
    "half": "training|rollout",
    "level": "token|seq",
    "size": "mean|median|max|min",
    "end": "min|max",
    "most": "mean|max",
    "reward": r"-?[\d.]+(?:e[+-]?\d+)?",
    "reason": ".+",
    "part": ".+",
    "pass": "log_probs|ref_log_probs|teacher_log_probs|values|forward_backward|critic_forward_backward",
    "where": "device|waiting|resident",
    "set": r"(?:(?!-pass@\d+\Z|-truncated_ratio\Z)[^/])+",
    "pair": "accuracy|chosen_reward|rejected_reward|reward_margin",
}
"""Meanings of ``<…>`` in a name, as regular expressions."""


@functools.cache
def table() -> dict[str, dict[str, dict[str, str]]]:
    """Sections of names, each with what it ``is`` and, where they apply, ``when`` and ``upstream``."""
    return {name: rows for name, rows in _file().items() if name in SECTIONS}


@functools.cache
def absent() -> dict[str, str]:
    """Upstream's names that are not here, and what to look at."""
    return dict(_file()["absent"])


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files("slime_launch").joinpath("metric_names.toml").read_text(encoding="utf-8"))


@functools.cache
def _patterns() -> dict[str, re.Pattern[str]]:
    names = (name for rows in table().values() for name in rows)
    return {name: re.compile("".join(map(_part, re.split(r"(<\w+>)", name)))) for name in names}


def _part(text: str) -> str:
    return f"(?:{PLACES[text[1:-1]]})" if text.startswith("<") else re.escape(text)


def entry_of(metric: str) -> str | None:
    """The name in the table that a metric goes by; ``None`` if it is not there, as those of users' functions."""
    return next((name for name, pattern in _patterns().items() if pattern.fullmatch(metric)), None)


def unlisted(row: Iterable[str]) -> list[str]:
    """Metrics of a row of ``metrics.jsonl`` that are not in the table."""
    return [name for name in row if "/" in name and entry_of(name) is None]
