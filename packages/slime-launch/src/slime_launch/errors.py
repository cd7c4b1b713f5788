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
    """Ray itself is gone, so nothing can be stopped in order."""


class Stopped(BaseException):
    """A signal asked the run to stop. Not an `Exception`, so that no handler swallows it.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """Exit code by shell convention: 128 + the signal's number."""
        return 128 + self.signum
