"""A parser for small commands: what is wrong with one is one line, which knows what a misspelt flag may mean."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from slime_core.errors import ConfigError
from slime_core.words import did_you_mean

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, which ends with the command that shows its help.

    Attributes:
        problem: The error that is raised.
    """

    problem: ClassVar[type[ConfigError]] = ConfigError

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raises ``problem``."""
        if (wrong := _CHOICE.search(message)) and (near := did_you_mean(wrong[1], re.findall("'(.*?)'", wrong[2]))):
            message = f"{message}; {near}"
        raise self.problem(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's, but nothing may be left over; an unknown flag comes first: it may mean a required one."""
        words = list(sys.argv[1:] if args is None else args)
        known = [name for action in self._actions for name in action.option_strings]
        has_commands = self._subparsers is not None  # the words behind a command are for its own parser
        own = itertools.takewhile(lambda word: word.startswith("-") if has_commands else word != "--", words)
        flags = dict.fromkeys(word.partition("=")[0] for word in own if re.match(r"--[A-Za-z]", word))
        if unknown := [flag for flag in flags if flag not in known]:
            near = [f"{flag} ({near})" if (near := did_you_mean(flag, known)) else flag for flag in unknown]
            self.error(f"unknown flag{'s' * (len(unknown) > 1)} {', '.join(near)}")
        found, left = super().parse_known_args(words, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left
