"""What cannot be scored costs the samples' reward, never the run; a function that never scores ends it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from slime_core.interfaces import Reward, RewardValue
from slime_core.types import Group, Sample
from slime_rollout.errors import RewardError, VerifierError

logger = logging.getLogger(__name__)

FAILURE_KEY = "reward_failure"
"""Entry of a sample's metadata that says why it could not be scored."""
MOST_IN_A_ROW = 64
"""Calls of an own function that may fail one after the other: twice those that run, and may fail, at once."""

Outcome = RewardValue | VerifierError
"""A sample's reward, or why it has none."""


class Tolerance:
    """What becomes of samples that could not be scored: they get what a wrong answer gets, and a log line.

    Args:
        wrong: What a wrong answer gets; ``None`` for 0, with the names that the last reward had.
        names: Names that rewards are taken to have until there is one.
        drop: Also mark such samples ``remove_sample``, so that none of their tokens is trained on.
        name: What scores, for messages.
        most_in_a_row: The run ends when so many calls fail one after the other; ``None`` for never.
    """

    def __init__(
        self,
        wrong: RewardValue | None = None,
        *,
        drop: bool,
        names: Iterable[str] = (),
        name: str = "",
        most_in_a_row: int | None = None,
    ) -> None:
        self._learns = wrong is None
        self._wrong: RewardValue = wrong if wrong is not None else dict.fromkeys(names, 0.0) or 0.0
        self._drop, self._name, self._most_in_a_row = drop, name, most_in_a_row
        self._in_a_row, self._has_scored = 0, False

    def settle(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> list[RewardValue]:
        """The rewards of the samples of one call; ``metadata["reward_failure"]`` of those without one has the reason.

        Raises:
            RewardError: No sample was scored, and too many calls before were alike.
        """
        errors = [outcome for outcome in outcomes if isinstance(outcome, VerifierError)]
        if len(errors) == len(outcomes):
            self._count_failure(errors[-1])
        else:
            self._in_a_row, self._has_scored = 0, True
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
        if sample.metadata.pop(FAILURE_KEY, None) is not None and self._drop:
            sample.remove_sample = False  # it was scored before, and generated again since
        return outcome

    def _count_failure(self, error: VerifierError) -> None:
        self._in_a_row += 1
        if self._most_in_a_row is not None and self._in_a_row >= self._most_in_a_row:
            before = "" if self._has_scored else " and has never given a reward"
            raise RewardError(
                f"{self._name} has failed {self._in_a_row} times in a row{before}; at last: {error}"
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
