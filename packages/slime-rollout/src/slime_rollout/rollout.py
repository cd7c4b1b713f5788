"""`RolloutManager`: prompts in, scored samples out, one rollout at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.hooks import HookArgs
from slime_core.interfaces import GroupReward, RewardValue
from slime_core.metrics import rollout_metrics
from slime_core.types import EvalReport, Group, RolloutBatch, Sample, Status
from slime_rollout.config import RolloutConfig
from slime_rollout.data import Fate, PromptDataset, PromptEncoder, RolloutDataSource, load_tokenizer, make_data_source
from slime_rollout.errors import GenerationError
from slime_rollout.generate import EngineClient, SamplingParams, generate_sample, sampling_seed
from slime_rollout.rewards import make_group_reward, make_reward

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_Job = tuple[Sample, SamplingParams, str]


@dataclasses.dataclass(frozen=True)
class RolloutData:
    """All prompts of a run, tokenized.

    Attributes:
        source: Where the groups to train on come from.
        eval_sets: Name → held-out prompts.
    """

    source: RolloutDataSource
    eval_sets: dict[str, PromptDataset]

    @classmethod
    def load(cls, config: RolloutConfig, hook_args: HookArgs | None = None) -> RolloutData:
        """Read everything. Most of the time goes into importing transformers; no engine is needed for it.

        Args:
            config: Where they are.
            hook_args: Every flag by its name, for an own data source; by default those of ``config``.

        Raises:
            ConfigError: The tokenizer or the data source cannot be used.
            DataError: A prompt file breaks its format.
        """
        encoder = PromptEncoder(
            load_tokenizer(config.hf_checkpoint),
            apply_chat_template=config.apply_chat_template,
            template_kwargs=config.chat_template_kwargs,
        )
        parts = [PromptDataset.load(path, config, encoder) for path in config.prompt_paths]
        source = make_data_source(
            config,
            PromptDataset.join(parts, config.prompt_data_weights),
            hook_args or HookArgs.from_configs(config),
        )
        return cls(source, {name: PromptDataset.load(path, config, encoder) for name, path in config.eval_sets.items()})


class RolloutManager:
    """Generates and scores rollouts, and evaluates. Implements `slime_core.interfaces.Rollout`.

    All data is read, and the reward function loaded and checked, when the object is made. Each call runs its own event
    loop and closes its connections, so nothing is shared between calls but the data position. A call that fails or is
    interrupted leaves that position where it was.

    Args:
        config: Prompts, sampling, rewards and evaluation.
        router_url: Address of sglang-router, or of one engine.
        run_seed: Seed that every sample's own sampling seed comes from.
        data: The prompts of ``config``, if they have been read already.
        hook_args: Every flag by its name, for reward functions; by default those of ``config``.
        on_progress: Called with the number of scored samples and of all samples, after each one.

    Raises:
        ConfigError: The tokenizer or the reward function cannot be used.
        DataError: A prompt file breaks its format.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        router_url: str,
        run_seed: int,
        data: RolloutData | None = None,
        hook_args: HookArgs | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._router_url = router_url
        self._run_seed = run_seed
        self._on_progress = on_progress
        hook_args = hook_args or HookArgs.from_configs(config)
        self._reward = make_reward(config, hook_args)
        self._group_reward = make_group_reward(config, hook_args)
        data = data or RolloutData.load(config, hook_args)
        self._source, self._eval_sets = data.source, data.eval_sets

    @property
    def source(self) -> RolloutDataSource:
        """Where the groups come from."""
        return self._source

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score the next ``rollout_batch_size`` groups.

        Returns:
            The groups in the data source's order. ``seconds`` holds ``generate``, until the last response was there,
            and ``reward``, what scoring took after that; scores are computed while others still generate.

        Raises:
            GenerationError: The engines did not give a response.
            RewardError: The reward function failed.
            DataError: ``--reward-key`` names no entry of a reward, or an own data source gave what it must not.
        """
        before = self._source.state_dict()
        try:
            groups = self._source.get_samples(self._config.rollout_batch_size)
            params = SamplingParams.for_rollout(self._config)
            samples = [sample for group in groups for sample in group]
            seconds = asyncio.run(self._run([(sample, params, "rollout") for sample in samples]))
            metrics = rollout_metrics(samples, self._config.reward_key) | _engine_metrics(samples, seconds["generate"])
        except BaseException:
            self._source.load_state_dict(before)
            raise
        self._source.ledger.settle(groups, Fate.TRAINED)
        if problem := self._source.check_ledger():
            logger.error("rollout %d: %s", rollout_id, problem)
        return RolloutBatch(
            rollout_id=rollout_id,
            groups=groups,
            source_state=self._source.state_dict(),
            metrics=metrics,
            seconds=seconds,
        )

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score all held-out sets, with the same seeds every time: two reports differ by the weights alone.

        Raises:
            GenerationError: The engines did not give a response.
            RewardError: The reward function failed.
            DataError: ``--reward-key`` names no entry of a reward.
        """
        start = time.perf_counter()
        samples = {name: self._eval_samples(dataset) for name, dataset in self._eval_sets.items()}
        params = SamplingParams.for_evaluation(self._config)
        asyncio.run(self._run([(sample, params, f"eval/{name}") for name in samples for sample in samples[name]]))
        key = self._config.reward_key
        return EvalReport(
            rollout_id=rollout_id,
            pass_rates={
                name: sum(sample.scalar_reward(key) for sample in scored) / len(scored)
                for name, scored in samples.items()
            },
            samples=samples,
            seconds=time.perf_counter() - start,
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the data source, as plain values."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the group that came next when ``state`` was taken.

        Raises:
            DataError: The state belongs to other prompts.
        """
        self._source.load_state_dict(state)

    def _eval_samples(self, dataset: PromptDataset) -> Group:
        size = self._config.n_samples_per_eval_prompt
        return [
            sample
            for place in range(len(dataset))
            for sample in dataset.group(place, group_index=place, first_index=place * size, size=size)
        ]

    async def _run(self, jobs: Sequence[_Job]) -> dict[str, float]:
        """Generate and score all jobs at once; the wall time of both phases."""
        watch = _Stopwatch(len(jobs), self._on_progress)
        async with EngineClient(
            self._router_url,
            concurrency=self._config.rollout_concurrency,
            timeout=self._config.rollout_request_timeout,
        ) as client:
            if self._group_reward is None:
                await _all_of([self._run_one(client, job, watch) for job in jobs])
            else:
                groups = itertools.groupby(jobs, lambda job: (job[2], job[0].group_index))
                await _all_of([self._run_group(client, list(group), self._group_reward, watch) for _, group in groups])
        return watch.seconds()

    async def _run_one(self, client: EngineClient, job: _Job, watch: _Stopwatch) -> None:
        await self._generate_one(client, job, watch)
        (sample, _, _) = job  # one that was given back keeps its reward
        self._scored(sample, await self._reward(sample) if sample.reward is None else sample.reward, watch)

    async def _run_group(
        self, client: EngineClient, jobs: Sequence[_Job], reward: GroupReward, watch: _Stopwatch
    ) -> None:
        await _all_of([self._generate_one(client, job, watch) for job in jobs])
        group = [sample for sample, _, _ in jobs]
        given = [sample.reward for sample in group if sample.reward is not None]  # as above, if all have one
        for sample, value in zip(group, given if len(given) == len(group) else await reward(group), strict=True):
            self._scored(sample, value, watch)

    async def _generate_one(self, client: EngineClient, job: _Job, watch: _Stopwatch) -> None:
        sample, params, stream = job
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):  # as one may be that was given back
            await generate_sample(client, sample, params, sampling_seed(self._run_seed, sample.index, stream=stream))
        watch.generated()
        if sample.status is Status.ABORTED:
            raise GenerationError(
                f"an engine aborted sample {sample.index} after {sample.response_length} tokens; "
                "something else paused or stopped it while this rollout ran"
            )

    def _scored(self, sample: Sample, value: RewardValue, watch: _Stopwatch) -> None:
        sample.reward = value
        sample.scalar_reward(self._config.reward_key)  # raises now, not after the rollout, if --reward-key is wrong
        watch.scored()


class _Stopwatch:
    """Times the two phases of a rollout and reports its progress."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._total, self._done, self._on_progress = total, 0, on_progress
        self._start = self._last_generated = time.perf_counter()

    def generated(self) -> None:
        self._last_generated = time.perf_counter()

    def scored(self) -> None:
        self._done += 1
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def seconds(self) -> dict[str, float]:
        return {
            "generate": self._last_generated - self._start,
            "reward": time.perf_counter() - self._last_generated,
        }


def _engine_metrics(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Response tokens, their rate, and the range of their weight versions."""
    versions = [version for sample in samples for version in sample.weight_versions]
    tokens = len(versions)
    metrics = {"response_tokens": float(tokens), "tokens_per_second": tokens / seconds}
    if versions:
        metrics |= {"weight_version/min": float(min(versions)), "weight_version/max": float(max(versions))}
    return metrics


async def _all_of(tasks: Sequence[Any]) -> None:
    """Run coroutines together; the first error stops the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
