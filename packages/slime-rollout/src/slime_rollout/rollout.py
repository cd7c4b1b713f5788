"""`RolloutManager`: prompts in, scored samples out, one rollout at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from slime_core.hooks import HookArgs
from slime_core.metrics import rollout_metrics
from slime_core.types import EvalReport, RolloutBatch, Sample
from slime_rollout import event_loop, failures
from slime_rollout.collect import Collected, Collector
from slime_rollout.config import RolloutConfig
from slime_rollout.continuous import ContinuousCollector
from slime_rollout.data import PromptEncoder, RolloutDataSource, load_source, load_tokenizer
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.evaluate import Evaluator, HeldOutPrompts
from slime_rollout.filters import FilterCalls, make_filter
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams, make_generate
from slime_rollout.generate.context import with_router
from slime_rollout.http import RETRY_DELAYS
from slime_rollout.pipeline import GroupPipeline, Progress
from slime_rollout.rewards import Scorers
from slime_rollout.source_calls import SourceCalls
from slime_rollout.teacher import TeacherLogProbs, make_teacher

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RolloutData:
    """All prompts of a run, tokenized; with ``--streaming-data`` those to train on are so when their turn comes.

    Attributes:
        source: Where the groups to train on come from.
        eval_sets: The held-out sets.
        tokenizer: The model's.
    """

    source: RolloutDataSource
    eval_sets: list[HeldOutPrompts]
    tokenizer: Any

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
        tokenizer = load_tokenizer(config.hf_checkpoint)
        source = load_source(config, PromptEncoder.of(config, tokenizer), hook_args or HookArgs.from_configs(config))
        return cls(source, [HeldOutPrompts.load(held_out, tokenizer) for held_out in read_eval_sets(config)], tokenizer)


class RolloutManager:
    """Generates and scores rollouts, and evaluates. Implements `slime_core.interfaces.Rollout`.

    All data is read, and the reward function loaded and checked, when the object is made. Each call runs its own event
    loop and closes its connections, so nothing is shared between calls but the data source. A call that fails or is
    interrupted leaves that where it was. With ``--async-buffer-size`` a thread goes on generating between the calls,
    from the first :meth:`generate` to :meth:`close`.

    Args:
        config: Prompts, sampling, rewards and evaluation.
        router_url: Address of sglang-router, or of one engine.
        run_seed: Seed that every sample's own sampling seed comes from.
        data: The prompts of ``config``, if they have been read already.
        hook_args: Every flag by its name, for reward functions; by default those of ``config``.
        on_progress: Called with the number of scored samples and of all samples, after each one.
        teacher: The teacher of ``config``, if it has been asked already whether it can be used.
        retry_delays: Mean seconds before each retry of a request; longer where engines are replaced (`patient_delays`).
        cache_namespace: Where engines keep their cache of prefixes over an update, `CacheNamespace("in_place")`.

    Raises:
        ConfigError: The tokenizer or the reward function cannot be used.
        DataError: A prompt file breaks its format.
        TeacherError: The teacher does not answer, or has another vocabulary.
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
        teacher: TeacherLogProbs | None = None,
        retry_delays: Sequence[float] = RETRY_DELAYS,
        cache_namespace: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config = config
        self._retry_delays, self._cache_namespace = retry_delays, cache_namespace
        self._router_url = router_url
        self._run_seed = run_seed
        self._on_progress = on_progress
        self._hook_args = with_router(hook_args or HookArgs.from_configs(config), router_url)
        data = data or RolloutData.load(config, self._hook_args)
        scorers = Scorers(config, self._hook_args, [one.held_out for one in data.eval_sets])
        scorer = scorers.of(config)
        self._pipeline = GroupPipeline(
            make_generate(config),
            scorer.reward,
            scorer.group_reward,
            teacher=teacher or make_teacher(config),
            reward_key=config.reward_key,
        )
        keep = make_filter(config, self._hook_args)
        self._filter = None if keep is None else FilterCalls(keep, config)
        self._thread: ContinuousCollector | None = None
        self._last_time: float | None = None
        self._source, self._tokenizer = data.source, data.tokenizer
        self._calls = SourceCalls(data.source, config)
        self._evaluator = Evaluator(
            data.eval_sets,
            scorers=scorers,
            run_seed=run_seed,
            tokenizer=data.tokenizer,
            hook_args=self._hook_args,
            on_progress=on_progress,
        )

    @property
    def source(self) -> RolloutDataSource:
        """Where the groups come from."""
        return self._source

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score the next ``rollout_batch_size`` groups.

        Returns:
            The groups in the data source's order. ``seconds`` holds ``generate``, until the last response was there,
            and ``reward``, what scoring took after that; scores are computed while others still generate.
            ``source_state`` has, besides the position, everything that was given back or is in flight.

        Raises:
            GenerationError: The engines did not give a response, or too many groups were dropped.
            RewardError: The reward function failed.
            TeacherError: The teacher gave no log-probs of a response.
            DataError: ``--reward-key`` names no entry of a reward, or an own data source gave what it must not.
            HookTimeoutError: A filter or a data source took too long. After that of a data source there is no going on.
        """
        self._calls.check()
        if self._config.async_buffer_size is not None:
            collected, problem, state = self._continuous().call(lambda collector: self._collect(collector, rollout_id))
        else:
            before = self._source.state_dict()
            try:
                collected, problem, state = event_loop.run(self._collect_once(rollout_id))
            except BaseException:
                if not self._calls.hangs:
                    self._source.load_state_dict(before)
                raise
        if problem:
            logger.error("rollout %d: %s", rollout_id, problem)
        samples = [sample for group in collected.groups for sample in group]
        return RolloutBatch(
            rollout_id=rollout_id,
            groups=collected.groups,
            source_state=state,
            metrics=rollout_metrics(samples, self._config.reward_key)
            | _engine_metrics(samples, self._seconds_since_last(collected))
            | _failure_metrics(samples)
            | (_age_metrics(samples, rollout_id) if self._config.may_lag else {})
            | collected.counts,
            seconds=collected.seconds,
        )

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score all held-out sets, with the same seeds every time: two reports differ by the weights alone.

        The position in the training data stays as it is.

        Raises:
            GenerationError: The engines did not give a response.
            RewardError: A reward function failed.
            DataError: ``--reward-key`` names no entry of a reward. Each of them names the set.
        """
        return self._evaluator.evaluate(rollout_id, self._client)

    def state_dict(self) -> dict[str, Any]:
        """State of the data source, as plain values; what is in flight is in it as it was handed out.

        Raises:
            HookTimeoutError: A call of the data source has not come back; it may be changing the state now.
        """
        self._calls.check()
        if self._thread is not None:
            return self._thread.call(self._state)
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the group that came next when ``state`` was taken.

        What is in flight is stopped.

        Raises:
            DataError: The state belongs to other prompts.
        """
        self.close()
        self._source.load_state_dict(state)

    def close(self) -> None:
        """Stop what ``--async-buffer-size`` has in flight. Another :meth:`generate` goes on with it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
            if not self._calls.hangs:
                self._source.load_state_dict(self._source.state_dict())  # what was out is handed out again first

    def _continuous(self) -> ContinuousCollector:
        if self._thread is None:
            self._thread = ContinuousCollector(self._open_collector)
        return self._thread

    def _seconds_since_last(self, collected: Collected) -> float:
        """What the samples of a rollout took: beside the trainer, all the time since the rollout before it."""
        before, self._last_time = self._last_time, time.perf_counter()
        if self._config.async_buffer_size is None or before is None:
            return collected.seconds["generate"]
        return self._last_time - before

    async def _state(self, collector: Collector) -> dict[str, Any]:
        return self._source.state_dict()

    @contextlib.asynccontextmanager
    async def _open_collector(self) -> AsyncIterator[Collector]:
        async with self._client() as client:
            context = GenerationContext(
                client=client,
                params=SamplingParams.for_rollout(self._config),
                run_seed=self._run_seed,
                tokenizer=self._tokenizer,
                args=self._hook_args,
            )
            yield Collector(self._config, self._calls, self._pipeline, self._filter, context, self._on_progress)

    async def _collect_once(self, rollout_id: int) -> tuple[Collected, str | None, dict[str, Any]]:
        async with self._open_collector() as collector:
            try:
                return await self._collect(collector, rollout_id)
            finally:
                await collector.cancel()

    async def _collect(self, collector: Collector, rollout_id: int) -> tuple[Collected, str | None, dict[str, Any]]:
        """A rollout, what is wrong with the ledger after it, and the data source's state after it."""
        collected = await collector.collect(rollout_id)
        if self._config.async_buffer_size is None and (returned := await collector.give_back()):
            collected.counts["groups_given_back"] = returned
        return collected, self._source.check_ledger(collector.in_flight()), self._source.state_dict()

    def _client(self) -> EngineClient:
        return EngineClient(
            self._router_url,
            concurrency=self._config.rollout_concurrency,
            timeout=self._config.rollout_request_timeout,
            retry_delays=self._retry_delays,
            cache_namespace=self._cache_namespace,
        )


def _engine_metrics(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Response tokens, their rate, and the range of their weight versions."""
    versions = [version for sample in samples for version in sample.weight_versions if version >= 0]
    tokens = len(versions)
    metrics = {"response_tokens": float(tokens), "tokens_per_second": tokens / max(seconds, 1e-9)}
    if versions:
        metrics |= {"weight_version/min": float(min(versions)), "weight_version/max": float(max(versions))}
    return metrics


def _failure_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """``reward_failures``: samples that could not be scored, if there are any."""
    failed = sum(failures.REWARD in sample.metadata for sample in samples)
    return {"reward_failures": float(failed)} if failed else {}


def _age_metrics(samples: Sequence[Sample], rollout_id: int) -> dict[str, float]:
    """``staleness/mean`` and ``/max``: versions between the oldest token of a sample and the weights trained next."""
    ages = [
        rollout_id - min(version for version in sample.weight_versions if version >= 0)
        for sample in samples
        if max(sample.weight_versions, default=-1) >= 0
    ]
    return {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))} if ages else {}
