"""Megatron's arguments that are not flags of slime's: parsed, answered or refused. Read only when one was typed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from slime_convert.shape import ModelShape
from slime_launch.devices import run_device
from slime_launch.parser import FlagGroup, without
from slime_launch.switches import OFF
from slime_megatron.service import (
    MegatronConfig,
    argument_notices,
    check_megatron_args,
    field_words,
    other_words,
    word_answer,
)

TITLE = "Megatron: its other arguments"
NOTE = (
    "Every argument of the installed Megatron-core, such as --moe-z-loss-coeff 0.001, and of Megatron's own command\n"
    "line. `slime-launch train --help-megatron` lists them, and says which have no effect here and which are refused."
)


class Answered(NamedTuple):
    """A command line without the words that are answered by a table, and the answers: no effect, or refused."""

    words: list[str]
    unused: list[str]
    problems: list[str]


def unknown_words(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """The flags of a command line that are not slime's, nor of SGLang and its router."""
    names = dict.fromkeys(word.split("=")[0] for word in argv if word.startswith("--"))
    return [name for name in names if name not in known and not name.startswith(("--sglang-", "--router-"))]


def megatron_groups(argv: Sequence[str], known: Collection[str]) -> list[FlagGroup]:
    """Megatron's words, in two groups; empty unless one may have been typed.

    The second group (refused arguments) is never offered as a suggestion.
    """
    words = field_words().values() if unknown_words(argv, known) else ()
    new = [word for word in words if word.spec.name not in known]
    taken = tuple(word.spec for word in new if not word.is_refused)
    refused = tuple(word.spec for word in new if word.is_refused)
    return [
        FlagGroup(TITLE, taken, NOTE, hidden=True),
        FlagGroup("Megatron: what is refused", refused, hidden=True, suggested=False),
    ]


def answered(argv: Sequence[str], known: Collection[str]) -> Answered:
    """Answer the words of Megatron's that name no field; ``known`` are those that the parser knows."""
    unused, problems, taken = [], [], []
    for name in unknown_words(argv, known):
        values = _values(argv, name)
        found = word_answer(name, values)
        if found is None:
            continue
        taken.append(name)
        if found.has_no_effect or [value.lower() in OFF for value in values] == [True]:
            unused.append(f"{name} ({found.reason})")
        else:
            problems.append(f"{name} cannot be given: {found.reason}")
    return Answered(without(argv, taken), unused, problems)


def check_arguments(megatron: MegatronConfig, shape: ModelShape, on_gpu: bool | None = None) -> None:
    """Check the values of Megatron's arguments; raises `ConfigError`, a line for each problem.

    They are for a machine with GPUs, or without, as ``on_gpu`` says; ``None`` is this one.
    """
    check_megatron_args(megatron, shape, on_gpu=run_device() == "cuda" if on_gpu is None else on_gpu)


def argument_notes(megatron: MegatronConfig, shape: ModelShape) -> list[str]:
    """Which of the arguments have no effect, in one line, if there are any."""
    lines = argument_notices(megatron, shape, on_gpu=run_device() == "cuda")
    return [f"Megatron's arguments: {'; '.join(lines)}"] if lines else []


def megatron_help(known: Collection[str]) -> Iterator[str]:
    """The text of ``--help-megatron``, a line for each word."""
    for name, word in sorted(field_words().items()):
        if name not in known:
            value = "" if word.spec.is_switch else f" VALUE{' …' if word.spec.nargs else ''}"
            why = f": {word.reason}" if word.reason else ""
            yield f"{name}{value}  {word.spec.help} [{word.becomes}{why}]"
    for name, found in sorted(other_words().items()):
        yield f"{name}  [{'no effect' if found.has_no_effect else 'refused'}: {found.reason}]"


def _values(argv: Sequence[str], name: str) -> list[str]:
    """The words that follow a flag."""
    values: list[str] = []
    is_own = False
    for word in argv:
        if word.startswith("--"):
            flag, _, attached = word.partition("=")
            is_own = flag == name
            word = attached
        if is_own and word:
            values.append(word)
    return values
