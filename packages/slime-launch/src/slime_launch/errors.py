"""The launcher's own errors. A message says what was given, what is allowed, and what to do."""

from __future__ import annotations

from slime_core.errors import ConfigError, SlimeError


class FlagError(ConfigError):
    """A command line that cannot be read."""


class PreflightError(ConfigError):
    """Something that the run needs is missing, malformed or taken; found before anything is started."""


class ManifestError(SlimeError):
    """A manifest that cannot be read, or a run in ``--save`` that this command does not continue."""


class PlacementError(SlimeError):
    """The cluster cannot hold the run."""


class RunError(SlimeError):
    """A part of a started run failed. The command line exits with 1 instead of 2."""


class RayDiedError(RunError):
    """Ray itself is gone, so that nothing can be stopped in order any more."""


class Stopped(BaseException):
    """The run was told to stop by a signal. Not an `Exception`, so that no handler swallows it.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that ended by this signal: 128 + its number."""
        return 128 + self.signum
