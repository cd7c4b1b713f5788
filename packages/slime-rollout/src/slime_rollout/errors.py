"""The errors of generation and scoring, and what a failed score costs a sample or the run.

Bad data is `slime_core.errors.DataError`, a bad flag `ConfigError`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from slime_core.errors import SlimeError
from slime_core.interfaces import GroupReward, Reward, RewardValue
from slime_core.types import Group, Sample

logger = logging.getLogger(__name__)

REWARD_FAILURE = "reward_failure"
"""Entry of a sample's metadata that says why it could not be scored."""
UNREADABLE = "reward_unreadable"
"""Set in addition where a rule could not read the response, which counts as wrong: nothing else had failed."""
TEACHER_FAILURE = "teacher_failure"
"""Entry of a sample's metadata that says why the teacher gave no log-probs."""
FAILURES = (REWARD_FAILURE, TEACHER_FAILURE)


class GenerationError(SlimeError):
    """An engine refused a request, did not answer in time, or its answer is invalid."""


class BatchError(SlimeError):
    """A batch cannot be trained on: its tokens are of other weights, a reward is missing, or the disk is full."""


class RewardError(SlimeError):
    """A reward function raised, took too long, or returned something other than a reward."""


class HookTimeoutError(SlimeError):
    """A user-defined function did not return in time; its thread is left behind."""


class VerifierError(RewardError):
    """A scorer raised, hung, crashed or returned no number. It costs these samples their reward, not the run."""


class UnreadableResponseError(VerifierError):
    """A built-in rule did not come to an end with a response, in its time and memory; its process was not at fault."""


class TeacherError(SlimeError):
    """The teacher of on-policy distillation gave no log-probs: it refused, was late, or answered about other tokens."""


Outcome = RewardValue | VerifierError
"""A sample's reward, or why it has none."""


def withdraw(sample: Sample, key: str, *, drop: bool = True) -> None:
    """Remove a failure from a sample's metadata; with ``drop`` it is trained on again if that was the last one."""
    was_there = sample.metadata.pop(key, None) is not None
    if key == REWARD_FAILURE:
        sample.metadata.pop(UNREADABLE, None)
    if was_there and drop and not any(other in sample.metadata for other in FAILURES):
        sample.remove_sample = False


@dataclass(frozen=True, kw_only=True)
class FailureLimit:
    """Failures in a row that end the run: once so many calls, samples and seconds since the first are all reached."""

    calls: int = 1
    samples: int = 1
    seconds: float = 0.0


class Tolerance:
    """Gives samples that could not be scored the reward of a wrong answer, with a log line; ends the run at a limit.

    Args:
        wrong: Reward of a wrong answer; ``None`` for 0, with the names that the last reward had.
        drop: Also mark such samples ``remove_sample``.
        names: Names of the rewards until the first one is known.
        name: The scorer, for messages.
        limit: ``None`` for no limit.
        strict: Raise failures instead.
        replaces: Whoever asks looks for failures, and trains on no sample that has one; said in the log.
    """

    def __init__(
        self,
        wrong: RewardValue | None = None,
        *,
        drop: bool,
        names: Iterable[str] = (),
        name: str = "",
        limit: FailureLimit | None = None,
        strict: bool = False,
        replaces: bool = False,
    ) -> None:
        self._replaces = replaces
        self._learns = wrong is None
        self._wrong: RewardValue = wrong if wrong is not None else dict.fromkeys(names, 0.0) or 0.0
        self._drop, self._name, self._limit, self._strict = drop, name, limit, strict
        self._failed_calls = self._failed_samples = 0
        self._failed_since, self._has_scored = 0.0, False

    def each(self, reward: Reward) -> Reward:
        """``reward`` with this tolerance of `VerifierError`; other errors end the run."""

        async def scored(sample: Sample) -> RewardValue:
            outcome: Outcome
            try:
                outcome = await reward(sample)
            except VerifierError as error:
                outcome = error
            return self.settle([sample], [outcome])[0]

        return scored

    def group(self, score: Callable[[Group], Awaitable[Sequence[Outcome]]]) -> GroupReward:
        """The same for a function that scores several samples in one call."""

        async def scored(group: Group) -> list[RewardValue]:
            outcomes: Sequence[Outcome]
            try:
                outcomes = await score(group)
            except VerifierError as error:
                outcomes = [error] * len(group)
            return self.settle(group, outcomes)

        return scored

    def settle(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> list[RewardValue]:
        """The rewards of one call's samples, which note failures; a `RewardError` at the limit, or if ``strict``."""
        errors = [outcome for outcome in outcomes if isinstance(outcome, VerifierError)]
        if errors and self._strict:
            raise errors[0]
        if len(errors) == len(outcomes):
            self._count_failure(len(errors), errors[-1])
        else:
            self._failed_calls, self._failed_samples, self._has_scored = 0, 0, True
        scores = [outcome for outcome in outcomes if not isinstance(outcome, VerifierError)]
        if self._learns and scores:
            last = scores[-1]
            self._wrong = {name: 0.0 for name in last if is_number(last[name])} if isinstance(last, dict) else 0.0
        for error in dict.fromkeys(errors):
            hit = [sample for sample, outcome in zip(samples, outcomes, strict=True) if outcome is error]
            stays = self._replaces and not isinstance(error, UnreadableResponseError)
            count = "" if stays else f" and {'counts' if len(hit) == 1 else 'count'} as wrong"
            logger.warning("%s could not be scored%s: %s", name_samples(hit), count, error)
        return [self._settle_one(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]

    def _settle_one(self, sample: Sample, outcome: Outcome) -> RewardValue:
        if isinstance(outcome, VerifierError):
            sample.metadata[REWARD_FAILURE] = str(outcome)
            sample.metadata.pop(UNREADABLE, None)
            if self._replaces and isinstance(outcome, UnreadableResponseError):
                sample.metadata[UNREADABLE] = True
            sample.remove_sample = sample.remove_sample or self._drop
            return dict(self._wrong) if isinstance(self._wrong, dict) else self._wrong
        withdraw(sample, REWARD_FAILURE, drop=self._drop)
        return outcome

    def _count_failure(self, samples: int, error: VerifierError) -> None:
        now, limit = time.monotonic(), self._limit
        if not self._failed_calls:
            self._failed_since = now
        self._failed_calls += 1
        self._failed_samples += samples
        seconds = now - self._failed_since
        if limit is None or self._failed_calls < limit.calls:
            return
        if self._failed_samples < limit.samples or seconds < limit.seconds:
            return
        how_long = f", for {seconds / 60:.0f} min" if limit.seconds else ""
        before = "" if self._has_scored else " and has never given a reward"
        raise RewardError(
            f"{self._name} has failed {self._failed_calls} times in a row{how_long}{before}; at last: {error}"
        ) from error


def is_number(value: object) -> bool:
    """Whether a part of a reward is a number, and not something that it carries."""
    return isinstance(value, int | float)


def name_samples(samples: Sequence[Sample]) -> str:
    """Samples in a few words."""
    first, last = samples[0].index, samples[-1].index
    return f"sample {first}" if len(samples) == 1 else f"{len(samples)} samples, {first} to {last}"
