"""One strict parser made from tables of flags: no abbreviations, no unknown flag, and errors that fit on one line."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from slime_core import one_line
from slime_core.effects import shown_needs
from slime_core.flags import FlagSpec
from slime_core.words import did_you_mean, suggestions
from slime_launch.answers import flag_line, foreign_answer, upstream_answer
from slime_launch.errors import FlagError
from slime_rollout.checks import ENDS

TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text"}
TAKEN_AS_A_FLAG = {
    ENDS: "give a run file as --config {word}",
    (".sh",): "`slime-launch migrate {word} --toml run.toml` makes a run file of a script",
    (".jsonl", ".parquet"): "give rows as --prompt-data {word}, or held-out ones as --eval-prompt-data NAME {word}",
}
"""Advice about a file that was given without its flag, by the end of its name."""
HAVE_FLAGS = (*ENDS, ".sh")
"""Files that have other flags in them, which would seem to be missing."""
_DASHES = "-\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"
"""Dashes that are pasted in place of two."""


@dataclasses.dataclass(frozen=True)
class FlagGroup:
    """Flags that ``--help`` shows under one title; if ``hidden``, it shows the description only.

    ``suggested`` says whether they are named where an unknown flag is like one of them.
    """

    title: str
    flags: tuple[FlagSpec, ...]
    description: str = ""
    hidden: bool = False
    suggested: bool = True


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message.removeprefix("argument "))


class WordsParser(one_line.OneLineParser):
    """A parser of a few words whose errors are one line, a :class:`FlagError`."""

    problem = FlagError


def build_parser(
    groups: Iterable[FlagGroup], *, prog: str, description: str, epilog: str = "", words: str = ""
) -> argparse.ArgumentParser:
    """The parser of ``groups``. It leaves absent flags out of its result; ``words`` are shown before the flags."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {words} [flags]" if words else f"{prog} [flags]",
        description=description,
        epilog=epilog or None,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups = list(groups)
    known = {spec.dest: spec for group in groups for spec in group.flags}
    for group in groups:
        section = parser.add_argument_group(group.title, group.description or None)
        for spec in group.flags:
            _add(section, spec, known, hidden=group.hidden)
    return parser


class Parsed(NamedTuple):
    """A command line, as far as it could be read.

    Attributes:
        given: The flags that were given, by ``dest``; one with several values has a tuple, all of them if repeated.
        problems: Unknown flags, values of the wrong type or out of range, missing values, unexpected words, and flags
            that must be given and are not: every one of them, a line each.
        unread: Of the flags whose value is not known for that, the ``dest``.
    """

    given: dict[str, Any]
    problems: list[str]
    unread: frozenset[str]


def parse(groups: Sequence[FlagGroup], parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that were given, as of :func:`parse_all`.

    Raises:
        FlagError: There are problems: all of them.
    """
    parsed = parse_all(groups, parser, argv)
    if parsed.problems:
        raise FlagError("\n".join(parsed.problems))
    return parsed.given


def parse_all(
    groups: Sequence[FlagGroup], parser: argparse.ArgumentParser, argv: Sequence[str], refused: Sequence[str] = ()
) -> Parsed:
    """Read what can be read, and say what cannot.

    ``refused`` are problems of the command line that were found already; they are among the others.

    Raises:
        FlagError: Nothing can be read.
    """
    known = {spec.name: spec for group in groups for spec in group.flags}
    names = dict.fromkeys(word.split("=")[0] for word in argv if word.startswith("--"))
    unknown = [name for name in names if name not in known and name not in ("--help", "--")]
    near = {spec.name for group in groups if group.suggested for spec in group.flags}
    problems = [*(unknown_flag(name, near) for name in unknown), *refused]
    unread = [meant for name in unknown if (meant := _meant(name, near)) is not None]
    words = without(argv, unknown)
    while True:
        try:
            namespace, extras = parser.parse_known_args(words)
            break
        except FlagError as error:
            problems.append(_with_advice(str(error), known))
            unread.append(str(error).partition(":")[0])
            before, words = words, without(words, unread[-1:])
            if words == before:  # not about a flag
                raise
    given = vars(namespace)
    if extras:
        problems += [unexpected(word, before, known) for word, before in strays(words, known)] or [
            unexpected(extras[0], "", known)
        ]
    for name, spec in known.items():
        if spec.dest in given:
            given[spec.dest] = tuple(given[spec.dest]) if spec.nargs else given[spec.dest]
            if (problem := spec.problem(given[spec.dest])) is not None:
                problems.append(problem)
                unread.append(name)
                del given[spec.dest]
    missing = [name for name, spec in known.items() if spec.default is dataclasses.MISSING and spec.dest not in given]
    if missing := [name for name in missing if name not in unread]:
        problems.append(f"missing {', '.join(missing)}; see --help")
    return Parsed(given, problems, frozenset(known[name].dest for name in (*unread, *missing) if name in known))


def _meant(name: str, known: Collection[str]) -> str | None:
    """The flag that an unknown one probably is."""
    answer = upstream_answer(name, known) or foreign_answer(name, known)
    return answer.to if answer is not None and answer.to else nearest(name, known)


def _with_advice(problem: str, known: Mapping[str, FlagSpec]) -> str:
    """The parser's line about a flag's value, with what the flag says of values that it does not take."""
    name, _, what = problem.partition(": ")
    advice = known[name].range.advice if name in known and what.startswith("invalid choice") else ""
    return f"{problem}; {advice}" if advice else problem


def without(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """The words without some flags and their values."""
    kept, is_kept = [], True
    for word in argv:
        if word.startswith("--"):
            is_kept = word.split("=")[0] not in names
        if is_kept:
            kept.append(word)
    return kept


def help_line(spec: FlagSpec, known: Mapping[str, FlagSpec] = MappingProxyType({})) -> str:
    """The line of one flag in ``--help``: text, unit, which of the ``known`` ones (by ``dest``) it needs, default."""
    facts = [spec.unit] if spec.unit else []
    facts += shown_needs(spec, known)
    if spec.default is dataclasses.MISSING:
        facts.append("required")
    elif not spec.is_switch and spec.default is not None and spec.default != ():
        facts.append(f"default {spec.default}")
    return f"{spec.help} [{'; '.join(facts)}]" if facts else spec.help


def _add(section: argparse._ArgumentGroup, spec: FlagSpec, known: Mapping[str, FlagSpec], *, hidden: bool) -> None:
    text = argparse.SUPPRESS if hidden else help_line(spec, known).replace("%", "%%")
    if spec.is_switch:
        section.add_argument(spec.name, dest=spec.dest, action="store_true", help=text)
        return
    several: dict[str, Any] = {"nargs": spec.nargs, "action": "extend"} if spec.nargs else {}
    if spec.bare is not None:
        several = {"nargs": "?", "const": spec.bare}
    section.add_argument(
        spec.name,
        dest=spec.dest,
        type=_reader(spec.type),
        choices=spec.choices,
        metavar=spec.metavar or (None if spec.choices else spec.type.__name__.upper()),
        help=text,
        **several,
    )


def _reader(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {TYPE_NAMES.get(kind, kind.__name__)}") from None

    return read


def leading_strays(argv: Sequence[str]) -> list[str]:
    """The words before the first flag."""
    return [*itertools.takewhile(lambda word: not word.startswith("--"), argv)]


def strays(argv: Sequence[str], known: Mapping[str, FlagSpec]) -> Iterator[tuple[str, str]]:
    """The words that belong to no flag, each with the flag before it as typed; empty where there is none."""
    before, left = "", 0.0  # how many words more the flag takes
    for word in argv:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            spec, before = known.get(name), word
            left = 0 if equals or (spec is not None and spec.is_switch) else math.inf
            left = 1 if left and spec is not None and not spec.nargs else left
        elif left < 1:
            yield word, before
        else:
            left -= 1


def check_has_flags(argv: Sequence[str], known: Mapping[str, FlagSpec]) -> None:
    """No file with flags in it stands where a flag is expected: what it has would seem to be missing.

    Raises:
        FlagError: One does; it alone is named.
    """
    if any(word.partition("=")[0] == "--config" for word in argv):
        return
    for word, before in strays(argv, known):
        if word.lower().endswith(HAVE_FLAGS):
            raise FlagError(unexpected(word, before, known))


def unexpected(word: str, before: str, known: Collection[str]) -> str:
    """Message for a word that belongs to no flag; the flag ``before`` it is the likely cause."""
    setting, equals, value = word.partition("=")
    if equals and (answer := foreign_answer(setting, known)) is not None:
        return f"unexpected {word!r}; {answer.why or f'here it is {answer.to} {answer.value or value}'}"
    ours = "--" + setting.strip(_DASHES).replace("_", "-")
    if ours in known and (equals or word[0] in _DASHES):
        return f"unexpected {word!r}; here it is {ours}{f' {value}' if value else ''}"
    for ends, advice in TAKEN_AS_A_FLAG.items():
        if word.lower().endswith(ends) and not (before and before.partition("=")[0] in advice):
            return f"unexpected {word!r}; {advice.format(word=shlex.quote(word))}"
    if not before:
        return f"unexpected {word!r}; flags start with --"
    return f"unexpected {word!r} after {before}; that flag takes no such value"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known flag closest to ``name``, as typed; ``None`` if none is close."""
    return next(iter(suggestions(name, known)), None)


def unknown_flag(name: str, known: Collection[str]) -> str:
    """The error line about a flag that does not exist."""
    if (line := flag_line(name, known)) is not None:
        return line
    last = f"--{name.rpartition('.')[2]}" if "." in name else name
    return f"unknown flag {name}; {did_you_mean(name, known) or did_you_mean(last, known) or 'see --help'}"
