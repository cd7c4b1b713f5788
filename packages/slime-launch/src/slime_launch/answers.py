"""Answers to flags of other launchers: upstream slime's, TRL's, verl's, OpenRLHF's. All are in ``answers.toml``.

A flag that our parser knows is the same, so a row of the table stops counting when its flag is built.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.resources import files
from typing import Any


class Outcome(Enum):
    """The kinds of answers."""

    SAME = "same"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    NOT_BUILT = "not built"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one flag.

    Attributes:
        to: Our flag, if it is renamed.
        why: Why it has no effect, or what to use where it is not built.
        only: Values that have no effect; empty where none has.
        same_family: Whether the value must name the family of ``--hf-checkpoint``.
        value: Our value in place of a switch.
        values: Our values in place of theirs; ``true`` and ``false`` give our switch or leave it out, and of several
            values one that is ``true`` gives it.
        times: What the value is multiplied by: ``engines``, ``samples`` of a prompt, ``gpus`` of an engine, the two
            samples of ``pairs``, or nothing.
        before: A word in front of the value; of the second and later values with their number.
        second: Our flag for the second of two values.
        off: The value that turns it off, as ours is without the flag.
        instead: What to give in place of values of theirs that ``values`` has not.
        also: A switch of ours that it needs.
        beside: Our flag in place of ``to``, or an empty text for none, by another flag of ours that the command has.
        with_flag: Our flag without which it has no effect (``with`` in the table).
        when: The row of another setting of theirs without which it is not looked at.
        unless: The row of one that says it better, where the command has it.
    """

    outcome: Outcome
    to: str = ""
    why: str = ""
    only: tuple[str, ...] = ()
    same_family: bool = False
    value: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    times: str = ""
    before: str = ""
    second: str = ""
    off: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    also: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    with_flag: str = ""
    when: str = ""
    unless: str = ""


SAME = Answer(outcome=Outcome.SAME)
UPSTREAM = {"no-effect": Outcome.NO_EFFECT, "renamed": Outcome.RENAMED, "not-built": Outcome.NOT_BUILT}
THEIR_OWN = ("loss_type",)
"""TRL's names that are ours, too, with a dash and another meaning."""
OTHERS = ("openrlhf", "trl", "verl")


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """``answers.toml``: sections, each with its rows by name."""
    return tomllib.loads(files("slime_launch").joinpath("answers.toml").read_text(encoding="utf-8"))


def upstream_answer(name: str, known: Collection[str]) -> Answer | None:
    """The answer to a flag of upstream slime, such as ``--use-tensorboard``; ``None`` if it is in no table."""
    if name in known:
        return SAME
    for section, outcome in UPSTREAM.items():
        row = table()[section].get(name.removeprefix("--"))
        if row is not None:
            answer = _answer(outcome, row)
            return None if answer.to and answer.to not in known else answer
    return None


def foreign_answer(name: str, known: Collection[str]) -> Answer | None:
    """The answer to a flag of OpenRLHF, TRL or Transformers, or a setting of verl such as ``data.train_files``."""
    answer = _foreign(name)
    if answer is not None and answer.to and answer.to not in known:
        return upstream_answer(answer.to, known) or Answer(outcome=Outcome.NOT_BUILT, why=f"{answer.to} is not built")
    return answer


def data_answer(name: str) -> Answer | None:
    """The answer to a flag of a program that trains on a data set, where it means something else there."""
    row = table()["on-data"].get(name.removeprefix("--").replace("_", "-"))
    return None if row is None else _answer(Outcome.RENAMED, row)


def named_here(name: str) -> str:
    """Our name of another launcher's flag, or that of the SGLang or Megatron flag it is; empty if there is none."""
    answer = _foreign(name)
    return "" if answer is None else answer.to


def row_of(name: str) -> str:
    """The name that the table has for another launcher's flag; empty if it has none."""
    keys = ((section, _key(name, section)) for section in OTHERS)
    return next((key for section, key in keys if key in table()[section]), "")


def _foreign(name: str) -> Answer | None:
    for section in OTHERS:
        row = table()[section].get(_key(name, section))
        if row is not None:
            return _answer(_outcome(row), row)
    return None


def _key(name: str, section: str) -> str:
    """A flag's name in a section of the table."""
    if section == "verl":
        return name.lstrip("+")
    plain = name.removeprefix("--")
    if section == "trl":
        return plain if plain in THEIR_OWN else plain.replace("_", "-")
    return str(table()["openrlhf-before"].get(plain, plain)) if name.startswith("--") else ""


def _outcome(row: Any) -> Outcome:
    if isinstance(row, str) or "to" in row:
        return Outcome.RENAMED
    return Outcome.NOT_BUILT if "advice" in row else Outcome.NO_EFFECT


def flag_line(name: str, known: Collection[str]) -> str | None:
    """The error line about a flag that is another launcher's; ``None`` if the table has no answer."""
    answer = upstream_answer(name, known) or foreign_answer(name, known)
    if answer is None or answer.outcome is Outcome.SAME:
        return None
    if answer.outcome is Outcome.RENAMED:
        return f"unknown flag {name}; here it is {answer.to}{' ' + answer.value if answer.value else ''}"
    if answer.outcome is Outcome.NO_EFFECT:
        return f"unknown flag {name}; leave it out: {answer.why}"
    return f"{name} is not built: {answer.why}"


def _answer(outcome: Outcome, row: Any) -> Answer:
    if isinstance(row, str):
        row = {"to" if outcome is Outcome.RENAMED else "why": row}
    names = {"with": "with_flag", "advice": "why"}
    values: dict[str, Any] = {names.get(key, key.replace("-", "_")): value for key, value in row.items()}
    if "only" in values:
        values["only"] = tuple(values["only"])
    return Answer(outcome=outcome, **values)
