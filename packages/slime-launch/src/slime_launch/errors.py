"""The launcher's own errors. A message says what was given, what is allowed, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from slime_convert.errors import ConvertError
from slime_core.errors import ConfigError, SlimeError

T = TypeVar("T")


class FlagError(ConfigError):
    """A command line that cannot be read."""


class PreflightError(ConfigError):
    """Something that the run needs is missing, malformed or taken; found before anything is started."""


class ProfileError(ConfigError):
    """A profile of a run's speeds that cannot be read or made, or that does not fit the command."""


class RecipeError(ConfigError):
    """There is no such recipe, or it cannot be read or copied."""


class Problems:
    """Runs checks one after the other, and reports what all of them found, each message once.

    What is said of flags that were ``unread``, by name in Python, is left out: their values are not known.
    """

    def __init__(self, known: Iterable[str] = (), unread: Collection[str] = ()) -> None:
        self._found: dict[str, Exception] = {line: ConfigError(line) for line in known}
        self._unread = unread
        self._settled: set[str] = set()

    def settle(self, name: str) -> None:
        """Leave out what is said from now on of a name, such as that of a model that is not there."""
        self._settled.add(name)

    def attempt(self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """The result of a check; ``None`` if it found a problem."""
        try:
            return check(*args, **kwargs)
        except (SlimeError, ConvertError) as error:
            lines = [line for line in about_read(str(error).splitlines(), self._unread) if self._is_new(line)]
            if lines == str(error).splitlines():
                self._found.setdefault(str(error), error)
            elif lines:
                self._found.setdefault("\n".join(lines), PreflightError("\n".join(lines)))
        except Exception:
            if not self._found:
                raise
            # It was not made for the values that were reported already.
        return None

    def _is_new(self, line: str) -> bool:
        return line not in self.lines and self._settled.isdisjoint(line.replace(",", "").split())

    @property
    def lines(self) -> list[str]:
        """All problems, in the order in which they were found."""
        return [line for message in self._found for line in message.splitlines()]

    def report(self) -> None:
        """Raise if there are problems: the one there is, or one error that names all."""
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            raise PreflightError("\n".join(self._found))


def about_read(lines: Sequence[str], unread: Collection[str]) -> list[str]:
    """The lines that name no flag which could not be read."""
    if not unread:
        return list(lines)
    names = "|".join(rf"--{re.escape(name.replace('_', '-'))}|(?<![\w-]){re.escape(name)}" for name in unread)
    return [line for line in lines if not re.search(rf"(?:{names})(?![\w-])", line)]


class ManifestError(SlimeError):
    """A manifest that cannot be read, or a run in ``--save`` that this command does not continue."""


class PlacementError(SlimeError):
    """The cluster cannot hold the run."""


class RunError(SlimeError):
    """A part of a started run failed. The command line exits with ``exit_code`` instead of 2."""

    exit_code = 1


class TrainerLostError(RunError):
    """A trainer rank died, hangs or lost the others. With ``--save`` the trainers can be started again."""


class LostContactError(TrainerLostError):
    """A trainer rank waited in vain for another one, which is a consequence of what happened to that."""


class RestartsExhaustedError(RunError):
    """The trainers, an engine or the router were lost once more than they may be started again."""

    exit_code = 3


class RayDiedError(RunError):
    """Ray itself is gone or stopped, so nothing can be stopped in order."""


class Stopped(BaseException):
    """A signal asked the run to stop. Not an `Exception`, so that no handler swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """Exit code by shell convention: 128 + the signal's number."""
        return 128 + self.signum
