"""What cannot be scored costs the samples' reward, never the run; a function that never scores ends it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from slime_core.interfaces import Reward, RewardValue
from slime_core.types import Group, Sample
from slime_rollout import failures
from slime_rollout.errors import RewardError, VerifierError

logger = logging.getLogger(__name__)

FAILURE_KEY = failures.REWARD
"""Entry of a sample's metadata that says why it could not be scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """How long nothing but failures is borne. The run ends with the failure that makes all of it true.

    Attributes:
        calls: So many calls failed one after the other.
        samples: So many samples were not scored, one after the other.
        seconds: The first of these calls failed so long ago.
    """

    calls: int = 1
    samples: int = 1
    seconds: float = 0.0


WITH_A_FUNCTION = Patience(calls=64)
"""Twice the calls of an own function that run, and may fail, at once."""
WITH_BATCHES = Patience(calls=8, samples=64)
"""Of a function that scores up to 64 samples in a call, one call runs at a time."""
WITH_A_SERVICE = Patience(samples=256, seconds=1800.0)
"""Others start a service again, which may take long; four times the samples that it is asked about at once."""

Outcome = RewardValue | VerifierError
"""A sample's reward, or why it has none."""


class Tolerance:
    """What becomes of samples that could not be scored: they get what a wrong answer gets, and a log line.

    Args:
        wrong: What a wrong answer gets; ``None`` for 0, with the names that the last reward had.
        names: Names that rewards are taken to have until there is one.
        drop: Also mark such samples ``remove_sample``, so that none of their tokens is trained on.
        name: What scores, for messages.
        patience: When nothing but failures ends the run; ``None`` for never.
    """

    def __init__(
        self,
        wrong: RewardValue | None = None,
        *,
        drop: bool,
        names: Iterable[str] = (),
        name: str = "",
        patience: Patience | None = None,
    ) -> None:
        self._learns = wrong is None
        self._wrong: RewardValue = wrong if wrong is not None else dict.fromkeys(names, 0.0) or 0.0
        self._drop, self._name, self._patience = drop, name, patience
        self._failed_calls = self._failed_samples = 0
        self._failed_since, self._has_scored = 0.0, False

    def settle(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> list[RewardValue]:
        """The rewards of the samples of one call; ``metadata["reward_failure"]`` of those without one has the reason.

        Raises:
            RewardError: No sample was scored, and too many calls before were alike.
        """
        errors = [outcome for outcome in outcomes if isinstance(outcome, VerifierError)]
        if len(errors) == len(outcomes):
            self._count_failure(len(errors), errors[-1])
        else:
            self._failed_calls, self._failed_samples, self._has_scored = 0, 0, True
        for outcome in outcomes:
            if self._learns and not isinstance(outcome, VerifierError):
                self._wrong = dict.fromkeys(outcome, 0.0) if isinstance(outcome, dict) else 0.0
        for error in dict.fromkeys(errors):
            hit = [sample for sample, outcome in zip(samples, outcomes, strict=True) if outcome is error]
            count = "counts" if len(hit) == 1 else "count"
            logger.warning("%s could not be scored and %s as wrong: %s", name_samples(hit), count, error)
        return [self._settle_one(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]

    def _settle_one(self, sample: Sample, outcome: Outcome) -> RewardValue:
        if isinstance(outcome, VerifierError):
            sample.metadata[FAILURE_KEY] = str(outcome)
            sample.remove_sample = sample.remove_sample or self._drop
            return dict(self._wrong) if isinstance(self._wrong, dict) else self._wrong
        failures.withdraw(sample, FAILURE_KEY, drop=self._drop)
        return outcome

    def _count_failure(self, samples: int, error: VerifierError) -> None:
        now, patience = time.monotonic(), self._patience
        if not self._failed_calls:
            self._failed_since = now
        self._failed_calls += 1
        self._failed_samples += samples
        for_seconds = now - self._failed_since
        if patience is None or self._failed_calls < patience.calls:
            return
        if self._failed_samples < patience.samples or for_seconds < patience.seconds:
            return
        how_long = f", for {for_seconds / 60:.0f} min" if patience.seconds else ""
        before = "" if self._has_scored else " and has never given a reward"
        raise RewardError(
            f"{self._name} has failed {self._failed_calls} times in a row{how_long}{before}; at last: {error}"
        ) from error


class NoTolerance(Tolerance):
    """Raises what went wrong, for those who try a function out."""

    def __init__(self) -> None:
        super().__init__(drop=False)

    def settle(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> list[RewardValue]:
        """The rewards.

        Raises:
            VerifierError: There is one among the outcomes; the first is raised.
        """
        for outcome in outcomes:
            if isinstance(outcome, VerifierError):
                raise outcome
        return super().settle(samples, outcomes)


class Tolerant:
    """Scores as another reward does; of a sample that this one cannot score becomes what the tolerance says.

    Args:
        reward: Raises `VerifierError` for such a sample. Its other errors end the run.
        tolerance: Counts and decides.
    """

    def __init__(self, reward: Reward, tolerance: Tolerance) -> None:
        self._reward, self._tolerance = reward, tolerance

    async def __call__(self, sample: Sample) -> RewardValue:
        """The reward.

        Raises:
            RewardError: As :meth:`Tolerance.settle`.
        """
        outcome: Outcome
        try:
            outcome = await self._reward(sample)
        except VerifierError as error:
            outcome = error
        return self._tolerance.settle([sample], [outcome])[0]


class TolerantGroup:
    """The same for samples that are scored in one call.

    Args:
        score: Gives the outcome of each sample, or raises `VerifierError` for all of them.
        tolerance: Counts and decides.
    """

    def __init__(self, score: Callable[[Group], Awaitable[Sequence[Outcome]]], tolerance: Tolerance) -> None:
        self._score, self._tolerance = score, tolerance

    async def __call__(self, group: Group) -> list[RewardValue]:
        """The rewards, in the samples' order.

        Raises:
            RewardError: As :meth:`Tolerance.settle`.
        """
        outcomes: Sequence[Outcome]
        try:
            outcomes = await self._score(group)
        except VerifierError as error:
            outcomes = [error] * len(group)
        return self._tolerance.settle(group, outcomes)


def name_samples(samples: Sequence[Sample]) -> str:
    """Samples in a few words, for messages."""
    first, last = samples[0].index, samples[-1].index
    return f"sample {first}" if len(samples) == 1 else f"{len(samples)} samples, {first} to {last}"
