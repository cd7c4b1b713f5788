"""What happens to one group: its samples are generated and scored, each as soon as it can be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from slime_core.interfaces import GroupReward, Reward, RewardValue
from slime_core.types import Group, Sample, Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate import GenerateGroup, GenerationContext

Progress = Callable[[int, int], None]
Teacher = Callable[[Sample], Awaitable[None]]
"""Sets ``teacher_log_probs`` of a finished sample."""


class GroupPipeline:
    """Generates and scores groups.

    Args:
        generate: Splits a group into what is generated independently.
        reward: Scores a sample, while others are generated.
        group_reward: Scores all samples of a group in its place, once they are there.
        teacher: Asked about each sample beside its reward, as soon as it is there.
        reward_key: Entry of a reward given by name that must be there.
    """

    def __init__(
        self,
        generate: GenerateGroup,
        reward: Reward,
        group_reward: GroupReward | None = None,
        *,
        teacher: Teacher | None = None,
        reward_key: str | None = None,
    ) -> None:
        self._generate = generate
        self._reward = reward
        self._group_reward = group_reward
        self._teacher = teacher
        self._reward_key = reward_key

    async def run(
        self, group: Group, context: GenerationContext, watch: Stopwatch, finished: list[Sample] | None = None
    ) -> Group:
        """Generate and score.

        Samples that were given back finished, or scored, keep what they have. Once ``context.stop`` is set, aborted
        responses are returned as they are, unscored; so is their whole group where groups are scored together.

        Args:
            group: The samples of one prompt; they are filled in.
            context: Where requests go, and what for.
            watch: Counts each sample.
            finished: Receives each sample whose generation is finished, before it is scored.

        Returns:
            What to train on, in the samples' order.

        Raises:
            GenerationError: The engines did not give a response.
            RewardError: The reward function failed.
            TeacherError: The teacher gave no log-probs.
            DataError: ``reward_key`` names no entry of a reward.
        """
        units = [self._run_unit(unit, context, watch, finished) for unit in self._generate(group, context)]
        with first_error_only():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(unit) for unit in units]
        samples = [sample for task in running for sample in task.result()]
        if self._group_reward is not None and not any(map(_is_cut_off, samples)):
            values: Sequence[RewardValue | None] = [sample.reward for sample in samples]
            if None in values:
                values = await self._group_reward(samples)
            for sample, value in zip(samples, values, strict=True):
                self._score(sample, value, watch)
        return samples

    async def _run_unit(
        self,
        unit: Awaitable[list[Sample]],
        context: GenerationContext,
        watch: Stopwatch,
        finished: list[Sample] | None,
    ) -> list[Sample]:
        samples = await unit
        watch.generated()
        if any(map(_is_cut_off, samples)):
            if not context.stop.is_set():
                raise _unexpected_abort(samples)
            return samples
        if finished is not None:
            finished += samples
        work: list[Awaitable[None]] = [self._teacher(sample) for sample in samples] if self._teacher else []
        if self._group_reward is None:
            work += [self._reward_one(sample, watch) for sample in samples]
        await all_of(work)
        return samples

    async def _reward_one(self, sample: Sample, watch: Stopwatch) -> None:
        self._score(sample, await self._reward(sample) if sample.reward is None else sample.reward, watch)

    def _score(self, sample: Sample, value: RewardValue | None, watch: Stopwatch) -> None:
        sample.reward = value
        sample.scalar_reward(self._reward_key)  # raises now, not after the rollout, if --reward-key is wrong
        watch.scored()


class Stopwatch:
    """Times the two phases of a rollout and reports its progress.

    Args:
        total: Samples of a rollout.
        on_progress: Called with the number of scored samples and ``total`` after each one.
    """

    def __init__(self, total: int, on_progress: Progress | None = None) -> None:
        self._total, self._done, self._on_progress = total, 0, on_progress
        self.begin()

    def begin(self) -> None:
        """The trainer waits for a rollout from now on."""
        self.is_waiting = True
        self._start = self._last_generated = time.perf_counter()

    def generated(self) -> None:
        """A response is there."""
        self._last_generated = time.perf_counter()

    def scored(self) -> None:
        """A sample is scored."""
        self._done += 1
        if self._on_progress is not None and self.is_waiting:
            self._on_progress(min(self._done, self._total), self._total)

    def forget(self, count: int) -> None:
        """Scored samples are not trained on."""
        self._done -= count

    def forget_all(self) -> None:
        """No sample is in flight or waits any more."""
        self._done = 0

    def end(self, count: int) -> dict[str, float]:
        """The rollout is complete, with ``count`` samples.

        Returns:
            Wall time until the last response was there (``generate``) and since then (``reward``).
        """
        self.is_waiting = False
        self.forget(count)
        return {
            "generate": self._last_generated - self._start,
            "reward": time.perf_counter() - self._last_generated,
        }


async def all_of(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Run things together; the results in order. The first error stops the others and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    with first_error_only():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one if asyncio.iscoroutine(one) else _awaited(one)) for one in work]
    return [task.result() for task in running]


@contextlib.contextmanager
def first_error_only() -> Iterator[None]:
    """Raise the first error of a task group as it is."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def _is_cut_off(sample: Sample) -> bool:
    return sample.status in (Status.ABORTED, Status.PENDING)


def _unexpected_abort(samples: Sequence[Sample]) -> GenerationError:
    sample = next(sample for sample in samples if _is_cut_off(sample))
    if sample.status is Status.PENDING:
        return GenerationError(f"sample {sample.index} was generated and has no status; set completed or truncated")
    return GenerationError(
        f"an engine aborted sample {sample.index} after {sample.response_length} tokens; "
        "something else paused or stopped it while this rollout ran"
    )
