"""Switches that are said to be on or off: ``colocate: false`` in a run file, ``--colocate=false`` on a command line.

Off is the opposite switch where there is one, such as ``--no-offload-train``. Where there is none, ``--no-colocate`` is
``--colocate=false``, and a switch is off as long as it is not given; where something else switches it on, saying that
it is off is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from slime_convert.shape import SHAPE_FLAGS, ModelShape
from slime_core.errors import ConfigError
from slime_core.flags import FlagSpec
from slime_launch.config import Settings
from slime_launch.parser import TYPE_NAMES

ON, OFF = ("true", "on", "yes"), ("false", "off", "no")
"""How a switch is said to be on or off, whatever the letters' case; the first is what a run file's booleans become."""
_OPPOSITES = {
    "--bf16": ("--fp32",),
    "--fp32": ("--bf16",),
    "--offload": ("--no-offload-train", "--no-offload-rollout"),
}
"""Opposites that are not spelled with ``no-`` in front."""
_OTHER_MODE = "{}=false is {}; leave it out for the default"
_PREFIXES = ("--sglang-", "--router-", "--")
_IMPLIED: tuple[tuple[str, Callable[[Settings], bool], str], ...] = (
    ("debug_train_only", lambda settings: settings.kind.is_recorded, "--load-debug-rollout-data starts no engines"),
    (
        "sglang_enable_return_routed_experts",
        lambda settings: settings.rollout.sampling.use_rollout_routing_replay,
        "--use-rollout-routing-replay needs the experts that engines chose",
    ),
    (
        "sglang_enable_memory_saver",
        lambda settings: settings.kind.engines_sleep,
        "engines give their memory back while trainers work; --no-offload-rollout changes that",
    ),
)
"""Switches that nothing can switch off: name in Python, where something else switches them on, and what that is."""


class Switched(NamedTuple):
    """A command line whose switches have no values.

    Attributes:
        words: The words, with opposite switches in place of those that are off.
        off: Switches that are off and have no opposite, by name in Python.
        problems: Values that say neither on nor off, and what is on or off though it takes another value; a line each.
        unread: The flags that the problems are about.
        notes: Which other mode a switch that is off stands for, a line each.
    """

    words: list[str]
    off: frozenset[str]
    problems: list[str]
    unread: list[str]
    notes: list[str]


def second_switches(names: Collection[str]) -> set[str]:
    """Of settings by name in Python the switches that another setting says the opposite of, or stands for."""
    return {name for name in names if name.startswith("no_") and name[3:] in names} | {"fp32", "offload"} & {*names}


def _against(name: str) -> tuple[str, ...]:
    """How the opposite of a switch is spelled, whether or not there is one."""
    prefix = next(prefix for prefix in _PREFIXES if name.startswith(prefix))
    return _OPPOSITES.get(name, (f"{prefix}no-{name.removeprefix(prefix)}",))


def overridden(argv: Sequence[str]) -> frozenset[str]:
    """The flags of a run file that a command line replaces: those it gives, and their opposites."""
    found: set[str] = set()
    for word in argv:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.add(name)
            if value.lower() not in OFF:
                found.update(_against(name))
                found.update(name.replace(f"{prefix}no-", prefix, 1) for prefix in _PREFIXES)
    return frozenset(found)


def _can_be_off(spec: FlagSpec | None) -> bool:
    return spec is not None and (spec.is_switch or spec.bare is not None)


def _plain(word: str, known: Mapping[str, FlagSpec]) -> str:
    """A word, or ``--NAME=false`` for a ``--no-NAME`` that is not a flag itself, if ``--NAME`` can be off."""
    if word in known:
        return word
    names = (word.replace(f"{prefix}no-", prefix, 1) for prefix in _PREFIXES if word.startswith(f"{prefix}no-"))
    return next((f"{name}={OFF[0]}" for name in names if _can_be_off(known.get(name))), word)


def switched(
    argv: Sequence[str], known: Mapping[str, FlagSpec], *, booleans: Collection[str] = (), empty: Collection[str] = ()
) -> Switched:
    """Read the switches of a command line that have a value. What is not ``known`` stays as it is.

    Args:
        argv: The words; of a switch that is given more than once the last counts.
        known: The flags by name.
        booleans: Flags to which a run file gives ``true`` or ``false``.
        empty: Flags to which it gives an empty list.
    """
    argv = [_plain(word, known) for word in argv]
    last = {word.partition("=")[0]: place for place, word in enumerate(argv)}
    words: list[str] = []
    off: set[str] = set()
    problems: list[str] = []
    unread: list[str] = []
    notes: list[str] = []
    taken = ""  # the word before, if it has its value, or is left out
    for place, word in enumerate(argv):
        if not word.startswith("--"):
            if taken:
                problems.append(f"unexpected {word!r} after {taken}; flags start with --")
            else:
                words.append(word)
            continue
        name, equals, _ = word.partition("=")
        spec = known.get(name)
        if spec is None:
            taken = ""
            words.append(word)
            continue
        said, problem = _said(spec, word, is_boolean=name in booleans, is_empty=name in empty and not equals)
        if problem is not None:
            problems.append(problem)
            unread.append(name)
        if said == [] and place == last[name] and spec.is_switch and problem is None:
            said = [other for other in _against(name) if other in known]  # none: off as long as it is not given
            off.add(spec.dest)
            notes += [_OTHER_MODE.format(name, other) for other in said if other in _OPPOSITES and other not in last]
        taken = word if said != [word] else ""
        words += said
    return Switched(words, frozenset(off), problems, unread, notes)


def _said(spec: FlagSpec, word: str, *, is_boolean: bool, is_empty: bool) -> tuple[list[str], str | None]:
    """A flag as words without a boolean value, none if it is off or not given; and what is wrong with it."""
    name, equals, value = word.partition("=")
    lower = value.lower()
    if spec.is_switch:
        if not equals or lower in ON:
            return [name], None
        return [], None if lower in OFF else f"{word} must be true or false; {name} alone is true"
    if is_empty:
        return [], None if spec.nargs else f"{name[2:]} [] must be {_kind(spec)}; to leave it open, leave it out"
    words = ON if lower in ON else OFF if lower in OFF else ON if is_boolean and not equals else ()
    if words and spec.choices and (is_boolean or spec.bare is not None) and lower not in spec.choices:
        found = next((choice for choice in words if choice in spec.choices), None)
        if found is not None:
            return [f"{name}={found}"], None
    if is_boolean:
        shown = lower if equals else ON[0]
        return [], (
            f"{name[2:]} {shown} in the run file must be {_kind(spec)}; leave it out to have its default, and put "
            f"{' or '.join(words or OFF)} in quotes where the text is meant"
        )
    return [word], None


def _kind(spec: FlagSpec) -> str:
    if spec.choices:
        return f"one of {', '.join(spec.choices)}"
    return "a list" if spec.nargs else TYPE_NAMES.get(spec.type, spec.type.__name__)


def check_switched_off(settings: Settings, shape: ModelShape | None) -> None:
    """Check that switches which the command says are off are not switched on by something else.

    Raises:
        ConfigError: Something else switches it on: the model's config, or another flag.
    """
    problems = [
        f"--{name.replace('_', '-')}=false: {why}; leave it out"
        for name, is_on, why in _IMPLIED
        if name in settings.switched_off and is_on(settings)
    ]
    if shape is not None:
        problems += [
            f"{flag.name}=false: the model's config says yes; leave it out, or give the config that is meant"
            for flag in SHAPE_FLAGS
            if flag.dest in settings.switched_off and flag.compared and flag.value(shape)
        ]
    if problems:
        raise ConfigError("\n".join(problems))
