"""The file of ``--config`` (`slime_rollout.run_file`) in a command line, which wins over it.

Its ``true`` and ``false`` are for switches (`slime_launch.switches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_launch.switches import overridden
from slime_rollout.checks import FLAG, read_run_file, words_of


@dataclass(frozen=True)
class Expanded:
    """A command line with the flags of its file in it.

    Attributes:
        words: Those of the file that the command line does not replace, and then the command line.
        from_file: The first of these two.
        booleans: The flags, among these, to which the file gives ``true`` or ``false``.
        empty: Those to which it gives an empty list.
        path: The file.
        values: What it says of its flags that the command line does not replace.
    """

    words: list[str]
    from_file: list[str]
    booleans: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()
    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def with_config(argv: Sequence[str]) -> Expanded:
    """Read the file of ``--config``, if the command line has one.

    Raises:
        ConfigError: The file cannot be read, or a value has no form that a flag takes.
    """
    path = last_value(argv, FLAG)
    if path is None:
        return Expanded(list(argv), [])
    replaced = overridden(argv)
    given = {name: value for name, value in read_run_file(path).items() if name not in replaced}
    words = [word for name, value in given.items() for word in words_of(path, name, value)]
    booleans = frozenset(name for name, value in given.items() if isinstance(value, bool))
    empty = frozenset(name for name, value in given.items() if value == [])
    return Expanded([*words, *argv], words, booleans, empty, path, given)


def last_value(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag, read before the parser exists; ``None`` if it is not given."""
    found = None
    for place, word in enumerate(argv):
        name, equals, attached = word.partition("=")
        if name == flag:
            found = attached if equals else next(iter(argv[place + 1 : place + 2]), None)
    return found
