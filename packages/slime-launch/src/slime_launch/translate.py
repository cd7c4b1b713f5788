"""Words of another launcher's command as words of ours, and what became of each flag. Nothing is run or started."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import DataError
from slime_core.files import read_json
from slime_core.flags import FlagSpec
from slime_launch import switches
from slime_launch.answers import SAME, THEIR_OWN, Answer, Outcome, foreign_answer, row_of, table, upstream_answer
from slime_launch.megatron_flags import unknown_words
from slime_launch.parser import without
from slime_megatron.service import word_answer
from slime_rollout.config import BUILT_IN_ROLLOUTS

SETTING = re.compile(r"\+{0,2}[a-z_]+(\.[a-z_0-9]+)+=.*", re.DOTALL)
"""A word of verl's: ``actor_rollout_ref.actor.optim.lr=1e-6``."""
OFF = ("false", "none", "null")
"""Values with which a setting is as if it were not given."""
THEIRS = ("slime.", "slime_plugins.")
"""Packages of upstream's functions."""
KNOWS_THEIRS = ("--rollout-function-path", "--eval-function-path")
"""Flags that take `BUILT_IN_ROLLOUTS`, upstream's functions that mean what is built in."""


@dataclass(frozen=True)
class Item:
    """One flag of a command, or one setting of verl's, with its values."""

    name: str
    values: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """As typed."""
        return [self.name, *self.values] if self.name else list(self.values)


@dataclass(frozen=True)
class Became:
    """The outcome of one flag of a command.

    Attributes:
        words: The words that do the same here; none if it has no effect or is not built.
        note: Why, or what to do.
    """

    item: Item
    outcome: Outcome
    words: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Translated:
    """A command of ours: its words, flags with no effect and why, what else is said once, and what is wrong."""

    words: list[str]
    unused: list[str]
    notes: list[str]
    problems: list[str]


def items(argv: Sequence[str]) -> list[Item]:
    """The flags of a command with their values; words before the first flag stand alone, without a name."""
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
        elif SETTING.fullmatch(word) and (not found or not found[-1][0].startswith("--")):
            name, _, value = word.partition("=")
            found.append((name.lstrip("+"), [value]))
        elif found:
            found[-1][1].append(word)
        else:
            found.append(("", [word]))
    return [Item(name, tuple(values)) for name, values in found]


@dataclass(frozen=True)
class Context:
    """The context of an answer: what it depends on besides its flag.

    Attributes:
        known: The flags that our parser knows, by name.
        numbers: ``engines``, ``samples`` of a prompt and ``gpus`` of an engine, which some values are multiplied by.
        given: The flags of the command.
        ours: Our names of them, as far as there are any.
        rows: Those of other launchers that are not false, as typed, by their names in the table.
        hf_checkpoint: The model of the command, if it names one.
        foreign: Whether flags of OpenRLHF, TRL and verl are taken, too.
        on_data: Whether they are of a program that trains on the rows of a data set.
    """

    known: Mapping[str, FlagSpec]
    numbers: Mapping[str, int]
    given: frozenset[str]
    ours: frozenset[str]
    rows: Mapping[str, str]
    hf_checkpoint: str | None
    foreign: bool
    on_data: bool = False


def context(given: Sequence[Item], known: Mapping[str, FlagSpec], *, foreign: bool) -> Context:
    """The context of a command's flags."""
    last = {ours_of(item.name, known): item.values[0] for item in given if item.values}

    def number(name: str, default: int) -> int:
        text = last.get(name, "")
        return int(text) if text.isdecimal() and int(text) else default

    train = number("--actor-num-nodes", 1) * number("--actor-num-gpus-per-node", 1)
    gpus = number("--rollout-num-gpus-per-engine", 1)
    engines = number("--rollout-num-gpus", train) // gpus
    numbers = {"engines": max(1, engines), "samples": number("--n-samples-per-prompt", 1), "gpus": gpus, "pairs": 2}
    names = frozenset(item.name for item in given)
    ours = frozenset(ours_of(name, known) for name in names)
    rows = {row_of(item.name): item.name for item in given if not (item.values and item.values[0].lower() in OFF)}
    return Context(known, numbers, names, ours, rows, last.get("--hf-checkpoint"), foreign)


def ours_of(name: str, known: Mapping[str, FlagSpec]) -> str:
    """Our name of a flag; the name itself if there is none."""
    dashed = name.replace("_", "-")
    if name in known or (dashed in known and name.removeprefix("--") not in THEIR_OWN):
        return name if name in known else dashed
    answer = foreign_answer(name, known)
    return answer.to if answer is not None and answer.to else name


def translate_upstream(argv: Sequence[str], known: Mapping[str, FlagSpec]) -> Translated:
    """A command of ours that may hold flags of upstream slime: those with no effect are taken out, others renamed.

    What is the parser's to refuse stays as it is; ``known`` are the flags that it knows, by name.
    """
    names = {word.split("=")[0] for word in argv if word.startswith("--")}
    if names <= known.keys() and not any(word.startswith(THEIRS) for word in argv):
        return Translated(list(argv), [], [], [])
    given = items(argv)
    around = context(given, known, foreign=False)
    words: list[str] = []
    unused: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    for item in given:
        became = become(item, around)
        if became.outcome is Outcome.NO_EFFECT:
            unused.append(f"{item.name} ({became.note})")
        elif became.outcome is Outcome.REFUSED:
            problems.append(became.note)
        elif became.outcome is Outcome.RENAMED:
            notes.append(f"{' '.join(item.words)} is {' '.join(became.words)} here")
            words += became.words
        else:
            words += item.words
    return Translated(words, unused, notes, problems)


def answered(argv: Sequence[str], known: Collection[str]) -> Translated:
    """Answer the words of Megatron's that name no field; ``known`` are those that the parser knows."""
    unused, problems, taken = [], [], []
    for name in unknown_words(argv, known):
        values = [
            value for item in items(argv) if item.name == name for value in item.values if value not in ("", "--")
        ]
        found = word_answer(name, values)
        if found is None:
            continue
        taken.append(name)
        if found.has_no_effect or [value.lower() in switches.OFF for value in values] == [True]:
            unused.append(f"{name} ({found.reason})")
        else:
            problems.append(f"{name} cannot be given: {found.reason}")
    return Translated(without(argv, taken), unused, [], problems)


def become(item: Item, around: Context) -> Became:
    """The outcome of one flag."""
    known = around.known
    path = next((value for value in item.values if value.startswith(THEIRS)), None)
    is_built_in = path in BUILT_IN_ROLLOUTS and item.name in known and item.name in KNOWS_THEIRS
    if (
        path is not None
        and not is_built_in
        and (path in table()["paths"] or (item.name in known and "path" in item.name))
    ):
        return _path(item, path, around)
    answer = upstream_answer(item.name, known)
    if answer is None and around.foreign:
        dashed = item.name.replace("_", "-")
        is_other = item.name.removeprefix("--") in (*THEIR_OWN, *table()["openrlhf-before"])
        if item.name.startswith("--") and dashed in known and not is_other:
            return Became(item, Outcome.SAME, (dashed, *item.values))
        answer = foreign_answer(item.name, known)
    if answer is None:
        return Became(item, Outcome.UNKNOWN)
    if (left_out := _left_out(item, answer, around)) is not None:
        return Became(item, Outcome.NO_EFFECT, (), left_out)
    if answer.outcome is Outcome.NO_EFFECT:
        problem = _not_without_effect(item, answer, around)
        return Became(item, Outcome.REFUSED, (), problem) if problem else Became(item, answer.outcome, (), answer.why)
    if answer.outcome is Outcome.RENAMED:
        return renamed(item, answer, around)
    return Became(item, answer.outcome, tuple(item.words) if answer is SAME else (), answer.why)


def _left_out(item: Item, answer: Answer, around: Context) -> str | None:
    """Why a flag with this value, next to these other ones, changes nothing; ``None`` if it does."""
    if answer.off and item.values and _number(item.values[0]) == _number(answer.off):
        return (answer.why or f"off unless {answer.to} is given") if answer.to else "so it is here"
    if answer.unless and answer.unless in around.rows:
        return f"{around.rows[answer.unless]} says it"
    if answer.when and answer.when not in around.rows:
        return f"not looked at without {answer.when}"
    return None


def _not_without_effect(item: Item, answer: Answer, around: Context) -> str | None:
    """Why a value is refused though its flag has no effect; ``None`` if it is not."""
    if answer.only and item.values and item.values[0] not in answer.only:
        return f"{item.name} {item.values[0]} is not built; allowed: {', '.join(answer.only)} ({answer.why})"
    if answer.same_family and item.values:
        return family_problem(item.values[0], around.hf_checkpoint)
    return None


def renamed(item: Item, answer: Answer, around: Context) -> Became:
    """The outcome of a flag that has another name here."""
    values, to = list(item.values), answer.to
    for flag in around.ours.intersection(answer.beside):
        if not (to := answer.beside[flag]):
            return Became(item, Outcome.NO_EFFECT, (), answer.why)
    if answer.value:
        return Became(item, Outcome.RENAMED, (to, answer.value))
    is_switch = around.known[to].is_switch
    if answer.values and values:
        given = [part for value in values for part in _listed(value)] if is_switch else values[:1]
        if unknown := [value for value in given if value not in answer.values]:
            if advice := answer.instead.get(unknown[0]):
                return Became(item, Outcome.REFUSED, (), advice)
            allowed = answer.values if is_switch else dict.fromkeys(answer.values.values())
            has = f"{'allowed:' if is_switch else f'{to} has'} {', '.join(allowed)}"
            return Became(item, Outcome.REFUSED, (), f"{item.name} {unknown[0]} is not built; {has}")
        ours = [answer.values[value] for value in given]
        values[:1] = ["true"] if is_switch and "true" in ours else ours[0].split()
    if is_switch:
        if values and values[0].lower() == "false":
            return Became(item, Outcome.NO_EFFECT, (), f"off unless {to} is given")
        return Became(item, Outcome.RENAMED, (to,))
    if answer.times and values:
        if not values[0].isdecimal():
            return Became(item, Outcome.REFUSED, (), f"{item.name} {values[0]} must be a whole number")
        values[0] = str(int(values[0]) * around.numbers[answer.times])
    if answer.second and len(values) == 2:
        return Became(item, Outcome.RENAMED, (to, values[0], answer.second, values[1]))
    values = [part for value in values for part in _listed(value)]
    if answer.before:
        names = [f"{answer.before}{place or ''}" for place in (0, *range(2, len(values) + 1))]
        values = [part for pair in zip(names, values, strict=False) for part in pair]
    return Became(item, Outcome.RENAMED, (*([answer.also] if answer.also else []), to, *values))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.lower()


def _listed(value: str) -> list[str]:
    """The items of a value in Hydra's form ``[a,b]``, or the value itself without quotes."""
    if value.startswith("[") and value.endswith("]") and not value.startswith("[{"):
        return [part.strip().strip("\"'") for part in value[1:-1].split(",")]
    return [value.strip("\"'")]


def _path(item: Item, path: str, around: Context) -> Became:
    """A flag that names one of upstream's functions."""
    row = table()["paths"].get(path)
    if row is None:
        own = next((advice for part, advice in table()["path-advice"].items() if path.startswith(f"{part}.")), None)
        advice = own or "give a function of your own, or leave it out"
        return Became(item, Outcome.REFUSED, (), f"{item.name} {path} is upstream's own; {advice}")
    if "drop" in row:
        return Became(item, Outcome.NO_EFFECT, (), row["drop"])
    if "flag" in row:
        flag = row["flag"]
        if flag in around.given:
            return Became(item, Outcome.NO_EFFECT, (), f"{flag} does that here, and is given")
        return Became(item, Outcome.RENAMED, (flag, row["value"]))
    ours = tuple(row["to"] if value == path else value for value in item.values)
    return Became(item, Outcome.RENAMED, (item.name, *ours))


def family_problem(name: str, hf_checkpoint: str | None) -> str | None:
    """The problem of a ``--model-name`` of another family than ``--hf-checkpoint`` has; ``None`` if there is none."""
    config = Path(hf_checkpoint or "") / "config.json"
    try:
        family = str(read_json(config)["model_type"])
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None  # the preflight has more to say about that directory
    if _plain(family) in _plain(name) or _plain(name) in _plain(family):
        return None
    return f"--model-name {name} is another family than --hf-checkpoint {hf_checkpoint}, {family}; leave it out"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|config|forcausallm", "", name.lower())
