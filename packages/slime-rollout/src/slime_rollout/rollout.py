"""`RolloutManager`: prompts in, scored samples out, one rollout at a time."""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from slime_core.hooks import HookArgs
from slime_core.metrics import rollout_metrics
from slime_core.types import Account, EvalReport, Group, RolloutBatch, Sample
from slime_rollout.collect import Collected, Collector
from slime_rollout.config import RolloutConfig
from slime_rollout.data import AccountedSource, Fate, PromptEncoder, SourceCalls, load_source, load_tokenizer
from slime_rollout.engine.addresses import remember_key
from slime_rollout.errors import REWARD_FAILURE
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.evaluate import Evaluator, HeldOutPrompts
from slime_rollout.filters import make_filter
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams, TurnLog
from slime_rollout.generate.context import with_router
from slime_rollout.hooks import hook_args_of
from slime_rollout.hooks.rollout_function import find_functions
from slime_rollout.hooks.rollouts import RolloutHooks, SampleHooks
from slime_rollout.limits import ModelLimits
from slime_rollout.pipeline import GroupPipeline, Progress
from slime_rollout.rewards import Scorers
from slime_rollout.teacher import TeacherLogProbs, make_teacher
from slime_rollout.threads import LoopThread


@dataclasses.dataclass(frozen=True)
class RolloutData:
    """All prompts of a run, tokenized; with ``--streaming-data``, training prompts only when their turn comes."""

    source: AccountedSource
    eval_sets: list[HeldOutPrompts]
    tokenizer: Any

    @classmethod
    def load(cls, config: RolloutConfig, hook_args: HookArgs | None = None) -> RolloutData:
        """Read everything. Most of the time goes into importing transformers; no engine is needed for it.

        Raises `ConfigError` if the tokenizer or the data source cannot be used, and `DataError` if a prompt file is
        invalid.
        """
        tokenizer = load_tokenizer(config.data.hf_checkpoint, trust_remote_code=config.data.trust_remote_code)
        source = load_source(config, PromptEncoder.of(config, tokenizer), hook_args or hook_args_of(config))
        return cls(source, [HeldOutPrompts.load(held_out, tokenizer) for held_out in read_eval_sets(config)], tokenizer)


class RolloutManager:
    """Generates and scores rollouts, and evaluates.

    All data is read and hooks are checked when the object is made. One event loop, in a thread of its own, serves all
    calls. A rollout that fails or is interrupted leaves the data source as it was. With ``--async-buffer-size``
    generation goes on between the calls, from the first :meth:`generate` to :meth:`close`.

    Args:
        config: Prompts, sampling, rewards and evaluation.
        router_url: Address of sglang-router, or of one engine; not needed with a ``client`` of it.
        client: Sends the requests; by default `EngineClient.of` the settings and ``router_url``.
        run_seed: Seed that every sample's own sampling seed comes from.
        data: The prompts of ``config``, if they have been read already.
        hook_args: Every flag by its name, for hooks; by default those of ``config``.
        on_progress: Called with the number of scored samples and of all samples, after each one.
        teacher: The teacher of ``config``, if it has been checked already.
        turns: Where custom generate functions find what engines and tools have answered before a restart.

    Raises:
        ConfigError: The tokenizer or the reward function cannot be used.
        DataError: A prompt file is invalid.
        TeacherError: The teacher does not answer, or has another vocabulary.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        run_seed: int,
        router_url: str = "",
        client: EngineClient | None = None,
        data: RolloutData | None = None,
        hook_args: HookArgs | None = None,
        on_progress: Progress | None = None,
        teacher: TeacherLogProbs | None = None,
        turns: TurnLog | None = None,
        **former: Any,
    ) -> None:
        if unknown := former.keys() - {"retry_delays", "cache_namespace", "key"}:
            raise TypeError(f"RolloutManager has no argument {', '.join(sorted(unknown))}")
        if (client is None) == (not router_url) or (former and client is not None):
            raise TypeError("RolloutManager takes a router_url or a client of it, which has all that requests need")
        if former:
            text = f"RolloutManager takes {', '.join(former)} in client=EngineClient.of(…); here until the next release"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self._client = client = client or EngineClient.of(config, router_url, **former)
        self._config, self._turns, self._may_lag = config, turns, config.may_lag
        hook_args = with_router(hook_args or hook_args_of(config), client.url, client.key)
        remember_key(hook_args)
        data = data or RolloutData.load(config, hook_args)
        scorers = Scorers(config, hook_args, [one.held_out for one in data.eval_sets])
        self._sample_hooks, self._hooks = SampleHooks(config, hook_args), RolloutHooks(config, hook_args)
        pipeline = GroupPipeline(config, scorers.of(config), teacher or make_teacher(config), self._sample_hooks)
        self._calls = SourceCalls(data.source, config)
        self._function, self._eval_function = find_functions(config, hook_args)
        context = GenerationContext(
            client=client,
            params=SamplingParams.for_rollout(config),
            run_seed=run_seed,
            tokenizer=data.tokenizer,
            args=hook_args,
            with_experts=config.sampling.use_rollout_routing_replay,
            turns=turns,
            limits=ModelLimits.of(config.data.hf_checkpoint),
        )
        keep = make_filter(config, hook_args)
        self._collector = Collector(config, self._calls, pipeline, keep, context, on_progress)
        self._evaluator = Evaluator(
            data.eval_sets,
            scorers=scorers,
            run_seed=run_seed,
            tokenizer=data.tokenizer,
            hook_args=hook_args,
            sample_hooks=self._sample_hooks,
            hooks=self._hooks,
            on_progress=on_progress,
        )
        self._last_time: float | None = None
        self._thread = LoopThread("slime-generation", daemon_calls=False)
        weakref.finalize(self, self._thread.cancel_all, self._collector.close)

    @property
    def source(self) -> AccountedSource:
        """Where the groups come from."""
        return self._calls.source

    def generate(self, rollout_id: int, *, weight_version: int | None = None) -> RolloutBatch:
        """Generate and score the next ``rollout_batch_size`` groups; returns them in the data source's order.

        They are to be trained from ``weight_version``, by default ``rollout_id``. The batch's ``seconds`` holds
        ``generate``, until the last response was complete, and ``reward``, since then.

        Raises:
            GenerationError: The engines did not give a response, or too many groups were dropped.
            RewardError: The reward function failed.
            TeacherError: The teacher gave no log-probs of a response.
            DataError: ``--reward-key`` names no entry of a reward, or a custom data source returned something invalid.
            HookTimeoutError: A filter or a data source took too long. A data source cannot be used after that.
        """
        version = rollout_id if weight_version is None else weight_version
        self._sample_hooks.rollout_id = rollout_id
        start = time.perf_counter()
        own: dict[str, float] = {}
        if self._turns is not None:
            self._turns.forget(self._collector.settled)  # whoever asks for a rollout has written down the last one
            self._collector.settled.clear()
            most = self._config.selection.max_weight_staleness if self._may_lag else 0
            self._turns.versions = (0 if most is None else version - most, version)
        if self._function is None:
            collected = self._thread.run(self._collector.collect(rollout_id, version))
        else:
            groups, own = self._thread.run(self._function.collect(rollout_id, self._calls))
            collected = Collected(groups, {}, {"generate": time.perf_counter() - start, "reward": 0.0}, [])
        self._hooks.see_groups(collected.groups, collected.dropped, self._draw)
        samples = [sample for group in collected.groups for sample in group]
        if self._turns is not None:
            self._collector.settled.update(sample.trajectory for sample in samples)
        metrics = self._hooks.log(
            rollout_id,
            samples,
            rollout_metrics(samples, self._config.rewards.reward_key),
            _engine_metrics(samples, self._seconds_since_last(collected))
            | (_age_metrics(samples, version) if self._may_lag else {})
            | collected.counts
            | own,
            time.perf_counter() - start,
        )
        return RolloutBatch(
            rollout_id=rollout_id,
            weight_version=version,
            groups=collected.groups,
            metrics=metrics,
            seconds=collected.seconds,
            dropped=collected.examples,
        )

    def _draw(self, count: int) -> list[Group]:
        """The next groups of the data source for a hook, counted as filtered: nobody generates or trains on them."""

        async def draw() -> list[Group]:
            groups = self._calls.get_samples(count)
            self.source.ledger.settle(groups, Fate.FILTERED)
            return groups

        return self._thread.run(draw())

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score all held-out sets, with the same seeds every time: two reports differ by the weights alone.

        Raises `GenerationError`, `RewardError` and `DataError` as :meth:`generate` does; each names the set.
        """
        self._sample_hooks.rollout_id = rollout_id
        return self._thread.run(self._evaluate(rollout_id))

    def account(self) -> Account:
        """The account of all samples so far."""

        async def look() -> Account:
            return self._collector.account()

        return self._thread.run(look())

    def state_dict(self) -> dict[str, Any]:
        """State of the data source, with what is in flight as handed out; `HookTimeoutError` while a call hangs."""
        return self._thread.run(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stop what is in flight, and continue as when ``state`` was saved; a `DataError` if it is of other prompts."""
        self.close()
        self.source.load_state_dict(state)

    def hold(self) -> None:
        """Before engines get weights and compute what is in flight again (the pause mode ``retract``): end requests
        that ask for experts, so that each token's experts stay those of the weights that sampled it. They go on after
        :meth:`release`. See :meth:`EngineClient.hold`; may be called from any thread.
        """
        self._thread.submit(self._client.hold()).result()

    def release(self) -> None:
        """After the update, whether it succeeded or not."""

        async def release() -> None:
            self._client.release()

        self._thread.submit(release()).result()

    def cancel(self) -> None:
        """End a :meth:`generate` or :meth:`evaluate` of another thread, which raises `CancelledError`."""
        self._thread.cancel()

    def close(self) -> None:
        """Stop what is in flight and close the connections. Another :meth:`generate` goes on with it."""
        self._thread.run(self._close())

    async def _evaluate(self, rollout_id: int) -> EvalReport:
        if self._eval_function is not None:
            return await self._eval_function.evaluate(rollout_id, self._calls)
        return await self._evaluator.evaluate(rollout_id, await self._collector.open())

    async def _state(self) -> dict[str, Any]:
        self._calls.check()
        return self.source.state_dict()

    async def _close(self) -> None:
        await self._collector.close()
        if not self._calls.hangs:
            self.source.take_back()

    def _seconds_since_last(self, collected: Collected) -> float:
        """Seconds in which the samples were generated; asynchronously, all since the rollout before."""
        before, self._last_time = self._last_time, time.perf_counter()
        if self._config.selection.async_buffer_size is None or before is None:
            return collected.seconds["generate"]
        return self._last_time - before


def _engine_metrics(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Response tokens, their rate, the range of their weight versions, and samples that could not be scored."""
    versions = [version for sample in samples for version in sample.weight_versions if version >= 0]
    tokens = len(versions)
    metrics = {"response_tokens": float(tokens), "tokens_per_second": tokens / max(seconds, 1e-9)}
    if versions:
        metrics |= {"weight_version/min": float(min(versions)), "weight_version/max": float(max(versions))}
    if failed := sum(REWARD_FAILURE in sample.metadata for sample in samples):
        metrics["reward_failures"] = float(failed)
    return metrics


def _age_metrics(samples: Sequence[Sample], trained_from: int) -> dict[str, float]:
    """``staleness/mean`` and ``/max``: versions between the oldest token of a sample and the weights to be trained."""
    ages = [
        trained_from - min(version for version in sample.weight_versions if version >= 0)
        for sample in samples
        if max(sample.weight_versions, default=-1) >= 0
    ]
    return {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))} if ages else {}
