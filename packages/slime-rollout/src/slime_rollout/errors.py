"""The errors of generation and scoring. Bad data is `slime_core.errors.DataError`, a bad flag `ConfigError`."""

from slime_core.errors import SlimeError


class GenerationError(SlimeError):
    """An engine refused a request, gave no answer in time, or answered with something unusable."""


class RewardError(SlimeError):
    """A reward function raised, took too long, or returned something other than a reward."""


class HookTimeoutError(SlimeError):
    """A user-defined function did not return in time; its thread is left behind."""


class VerifierError(RewardError):
    """What scores gave no score for one sample, or for some: it raised, hung, crashed, or returned no number.

    It costs these samples their reward, not the run.
    """


class TeacherError(SlimeError):
    """The teacher of on-policy distillation gave no log-probs: refused, not in time, or of other tokens."""
