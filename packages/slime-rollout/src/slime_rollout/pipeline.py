"""One group: its samples are generated and scored, each as soon as it can be."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from slime_core.errors import DataError
from slime_core.interfaces import RewardValue
from slime_core.types import Group, Sample, Status
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import REWARD_FAILURE, UNREADABLE, GenerationError
from slime_rollout.generate import GenerationContext, make_generate
from slime_rollout.generate.context import ROLLOUT_STREAM
from slime_rollout.hooks.rollouts import SampleHooks
from slime_rollout.rewards.scorers import Scorer
from slime_rollout.threads import all_of

Progress = Callable[[int, int], None]
Teacher = Callable[[Sample], Awaitable[None]]
"""Sets ``teacher_log_probs`` of a finished sample."""
_PAUSES = (0.1, 1.0)  # seconds before a sample is scored again


class GroupPipeline:
    """Generates and scores groups.

    Each sample is scored while others are generated, or all samples of a group once they are there, as the scorer asks.
    The teacher is called for each sample while it is scored; ``hooks`` see it before that.
    """

    def __init__(
        self, config: RolloutConfig, scorer: Scorer, teacher: Teacher | None = None, hooks: SampleHooks | None = None
    ) -> None:
        self._generate = make_generate(config)
        self._scorer, self._teacher, self._hooks = scorer, teacher, hooks
        self._reward_key = config.rewards.reward_key
        self._replaces = config.rewards.rm_on_failure == "replace"

    async def run(
        self, group: Group, context: GenerationContext, watch: Stopwatch, finished: list[Sample] | None = None
    ) -> Group:
        """Generate and score the samples of one prompt; returns what to train on, in their order.

        Samples that were given back finished, or scored, keep what they have. Once ``context.stop`` is set, aborted
        responses are returned as they are, unscored; so is their whole group where groups are scored together.
        With ``--rm-on-failure replace`` what could not be scored is scored again, twice at most.
        ``finished`` receives each sample whose generation is finished, before it is scored.
        """
        units = [self._run_unit(unit, context, watch, finished) for unit in self._generate(group, context)]
        samples = [sample for part in await all_of(units) for sample in part]
        if any(map(is_cut_off, samples)):
            return samples
        grouped = self._scorer.group_reward is not None
        if grouped:
            await self._reward(samples, watch)
        for pause in _PAUSES if self._replaces else ():
            if not self.is_unscored(samples):
                break
            again = samples if grouped else [sample for sample in samples if REWARD_FAILURE in sample.metadata]
            await asyncio.sleep(pause)
            watch.forget(len(again))
            for sample in again:
                sample.reward = None
            await self._reward(again, watch)
        return samples

    async def _reward(self, samples: Group, watch: Stopwatch) -> None:
        if self._scorer.group_reward is None:
            await all_of([self._reward_one(sample, watch) for sample in samples])
            return
        values: Sequence[RewardValue | None] = [sample.reward for sample in samples]
        if None in values:
            values = await self._scorer.group_reward(samples)
        for sample, value in zip(samples, values, strict=True):
            self._score(sample, value, watch)

    def is_unscored(self, group: Group) -> bool:
        """Whether a group is to give way to another one, as a sample of it could not be scored."""
        return self._replaces and any(
            REWARD_FAILURE in sample.metadata and UNREADABLE not in sample.metadata for sample in group
        )

    async def _run_unit(
        self, unit: Awaitable[list[Sample]], context: GenerationContext, watch: Stopwatch, finished: list[Sample] | None
    ) -> list[Sample]:
        samples = await unit
        watch.generated()
        if any(map(is_cut_off, samples)):
            if not context.stop.is_set():
                raise _unexpected_abort(samples)
            return samples
        if self._hooks is not None:
            evaluation = context.stream != ROLLOUT_STREAM
            samples = [await self._hooks(sample, evaluation=evaluation) for sample in samples]
        if finished is not None:
            finished += samples
        work: list[Awaitable[None]] = [self._teacher(sample) for sample in samples] if self._teacher else []
        if self._scorer.group_reward is None:
            work += [self._reward_one(sample, watch) for sample in samples]
        await all_of(work)
        return samples

    async def _reward_one(self, sample: Sample, watch: Stopwatch) -> None:
        self._score(sample, await self._scorer.reward(sample) if sample.reward is None else sample.reward, watch)

    def _score(self, sample: Sample, value: RewardValue | None, watch: Stopwatch) -> None:
        sample.reward = value
        # Now, not after the rollout, if --reward-key is wrong, or the part it names.
        if not math.isfinite(sample.scalar_reward(self._reward_key)):
            raise DataError(f"sample {sample.index} has the reward {sample.reward}; set a finite number")
        watch.scored()


class Stopwatch:
    """Times the two phases of a rollout, and reports after each scored sample how many of ``total`` there are."""

    def __init__(self, total: int, on_progress: Progress | None = None) -> None:
        self._total, self._done, self._on_progress = total, 0, on_progress
        self.begin()

    def begin(self) -> None:
        """The trainer waits for a rollout from now on."""
        self.is_waiting = True
        self._start = self._last_generated = time.perf_counter()

    def generated(self) -> None:
        """A response is complete."""
        self._last_generated = time.perf_counter()

    def scored(self) -> None:
        """A sample is scored."""
        self._done += 1
        if self._on_progress is not None and self.is_waiting:
            self._on_progress(min(self._done, self._total), self._total)

    def forget(self, count: int) -> None:
        """Scored samples are not trained on."""
        self._done -= count

    def end(self, count: int) -> dict[str, float]:
        """A rollout of ``count`` samples is complete; returns seconds until the last response, and since then."""
        self.is_waiting = False
        self.forget(count)
        return {"generate": self._last_generated - self._start, "reward": time.perf_counter() - self._last_generated}


def is_cut_off(sample: Sample) -> bool:
    """Whether its generation was stopped before the end."""
    return sample.status in (Status.ABORTED, Status.PENDING)


def _unexpected_abort(samples: Sequence[Sample]) -> GenerationError:
    sample = next(sample for sample in samples if is_cut_off(sample))
    if sample.status is Status.PENDING:
        return GenerationError(f"sample {sample.index} was generated and has no status; set completed or truncated")
    return GenerationError(
        f"an engine aborted sample {sample.index} after {sample.response_length} tokens; "
        "something else paused or stopped it while this rollout ran"
    )
