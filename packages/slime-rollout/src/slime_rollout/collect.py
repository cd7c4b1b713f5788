"""Enough finished groups for a rollout: what is in flight, what is kept, and what goes back."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time

from slime_core.types import Account, Drop, Group, Keep, Sample, Status, Verdict
from slime_rollout.config import RolloutConfig
from slime_rollout.data import Fate, SourceCalls, copied_group
from slime_rollout.errors import FAILURES, REWARD_FAILURE, GenerationError, withdraw
from slime_rollout.filters import CustomFilter
from slime_rollout.generate import EngineClient, GenerationContext, by_trajectory, number_parts
from slime_rollout.generate.custom import begin_anew, forget_rows_prompts
from slime_rollout.hooks.rollouts import HOOKED
from slime_rollout.pipeline import GroupPipeline, Progress, Stopwatch, is_cut_off

logger = logging.getLogger(__name__)

EMPTY = "empty"
"""Drop reason for groups that produced no trainable samples."""
_ABORT_AGAIN_SECONDS = 0.5  # requests that were queued here come after the first abort
_ABORT_SECONDS = 30.0  # what ends a trajectory after its request was aborted, such as a tool, may take so long


@dataclasses.dataclass
class Collected:
    """The groups that one rollout trains on, in the order of their numbers.

    ``counts`` says how many groups were dropped, by reason, given back, or generated again because they were too old;
    ``seconds`` holds the wall time per phase. ``dropped`` holds the groups that a filter has dropped, if a hook wants
    to see them, and ``examples`` the first of them for each reason.
    """

    groups: list[Group]
    counts: dict[str, float]
    seconds: dict[str, float]
    dropped: list[Group]
    examples: dict[str, Group] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Work:
    """A group in flight, or one that may be trained on: ``group`` is first a copy of ``handed_out``, then its result.

    ``finished`` holds samples whose generation is finished, while others of the group still run.
    """

    handed_out: Group
    group: Group
    finished: list[Sample] = dataclasses.field(default_factory=list)


class Collector:
    """Keeps groups in flight until enough of them are finished and kept. Lives on one event loop.

    It works on copies: what the data source handed out stays as it was until the copy is finished, and only then is
    replaced by it. So the source's state can be saved at any time, and never holds half a response.

    Without ``keep`` all groups are trained on. The client of ``context`` is opened and closed here, and its ``stop`` is
    replaced for each rollout.

    Attributes:
        settled: Trajectories that are part of a rollout, or dropped for good; whoever needs them no more clears it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        calls: SourceCalls,
        pipeline: GroupPipeline,
        keep: CustomFilter | None,
        context: GenerationContext,
        on_progress: Progress | None = None,
    ) -> None:
        self._config, selection = config, config.selection
        self._in_flight, self._most_tried = selection.groups_in_flight, selection.most_groups_tried
        self._calls, self._source = calls, calls.source
        self._pipeline = pipeline
        self._keep = keep
        self._context = context
        self._on_progress = on_progress
        self._changed = asyncio.Event()
        self._rollout_id = self._version = 0
        self._is_open = False
        self.settled: set[int] = set()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._context = dataclasses.replace(self._context, stop=asyncio.Event())
        self._running: dict[_Work, asyncio.Task[None]] = {}
        self._ready: list[_Work] = []
        self._unfinished: list[Group] = []
        self._dropped: list[Group] = []
        self._examples: dict[str, Group] = {}
        self._error: BaseException | None = None
        self._started = 0
        self._counts: collections.Counter[str] = collections.Counter()
        selection = self._config.selection
        self._watch = Stopwatch(selection.rollout_batch_size * selection.n_samples_per_prompt, self._on_progress)

    async def collect(self, rollout_id: int, version: int) -> Collected:
        """Wait until the groups of a rollout, which is to be trained from weight ``version``, are finished.

        With ``--async-buffer-size`` others stay in flight for the next rollouts. Otherwise they go back to the data
        source, and a rollout that fails or is cancelled leaves the source as it was.
        """
        self._calls.check()
        await self.open()
        looks_ahead = self._config.selection.async_buffer_size is not None
        async with contextlib.AsyncExitStack() as stack:
            if not looks_ahead:  # an error undoes what was handed out, after all that is in flight was stopped
                stack.enter_context(self._calls.transaction())
                stack.push_async_callback(self.stop)
            self._rollout_id, self._version = rollout_id, version
            self._watch.begin()
            self._drop_aged()
            self._start(self._wanted())
            while len(self._ready) < self._config.selection.rollout_batch_size or self._error is not None:
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                await self._changed.wait()
            collected = self._take_rollout()
            if looks_ahead:
                self._look_ahead()
            elif returned := await self._give_back():
                collected.counts["groups_given_back"] = returned
        if problem := self.account().problem:
            logger.error("rollout %d: %s", rollout_id, problem)
        return collected

    def account(self) -> Account:
        """The fate of all samples; those in flight are rightly out."""
        in_flight = [work.handed_out for work in self._running] + [one.group for one in self._ready]
        return Account(self._source.ledger.counts, self._source.check_ledger(in_flight))

    async def open(self) -> EngineClient:
        """Connect, if that has not been done since the last :meth:`close`; returns the client."""
        if not self._is_open:
            self._is_open = True
            await self._context.client.__aenter__()
        return self._context.client

    async def close(self) -> None:
        """Stop what is in flight, and close the connections."""
        await self.stop()
        if self._is_open:
            self._is_open = False
            await self._context.client.__aexit__(None, None, None)

    async def stop(self) -> list[_Work]:
        """Cancel what is in flight at once, at the engines too, and forget what is finished; returns the former."""
        self._context.stop.set()
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        self._begin_anew()
        return list(running)

    def _take_rollout(self) -> Collected:
        size = self._config.selection.rollout_batch_size
        taken, self._ready = self._ready[:size], self._ready[size:]
        groups = sorted((one.group for one in taken), key=lambda group: group[0].group_index)
        counts, self._counts, self._started = self._counts, collections.Counter(), 0
        seconds = self._watch.end(sum(map(len, groups)))
        self._rollout_id, self._version = self._rollout_id + 1, self._version + 1
        number_parts(groups, self._source.fresh_index)
        self._source.ledger.settle(groups, Fate.TRAINED)
        forget_rows_prompts(groups)
        dropped, self._dropped = self._dropped, []
        examples, self._examples = self._examples, {}
        return Collected(groups, dict(counts), seconds, dropped, examples)

    async def _give_back(self) -> int:
        """Stop what is in flight, and give it and what is left over back to the data source; returns how many groups.

        With ``--partial-rollout`` a response that is cut off keeps its tokens; without it only finished ones are kept.
        """
        self._context.stop.set()
        if self._config.selection.partial_rollout:
            await self._cut_off()
        groups, error = [one.group for one in self._ready] + self._unfinished, self._error
        groups += [_to_give_back(work) for work in await self.stop()]
        if error is not None:
            raise error
        groups.sort(key=lambda group: group[0].group_index)
        number_parts(groups, self._source.fresh_index)
        if groups:
            self._calls.add_samples(groups)
        return len(groups)

    def _look_ahead(self) -> None:
        """Start groups for later rollouts. An error is raised by the next one: this one's groups are finished."""
        try:
            self._start(self._wanted())
        except Exception as error:
            if self._calls.hangs:  # no state can be saved any more
                raise
            self._fail(error)

    def _wanted(self) -> list[Group]:
        """As many groups of the data source as may be started now."""
        have, wanted = len(self._ready) + len(self._running), self._config.selection.rollout_batch_size
        if self._config.selection.async_buffer_size is not None:
            free = wanted * self._rollouts_ahead() - have
        else:
            free = self._in_flight - have if have < wanted else 0
        left = self._most_tried - self._started
        if free <= 0 or self._error is not None:
            return []
        if left > 0:
            return self._calls.get_samples(min(free, left))
        if have < wanted:
            self._fail(self._too_many())
        return []

    def _too_many(self) -> GenerationError:
        """A filter may drop every group there is, and the run would never end."""
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items())) or "none finished"
        return GenerationError(
            f"rollout {self._rollout_id} has {len(self._ready)} of {self._config.selection.rollout_batch_size} groups "
            f"after {self._started} were tried ({counts}); look at the rewards, loosen the filter or "
            "--max-weight-staleness, or raise --dynamic-sampling-max-prompts"
        )

    def _rollouts_ahead(self) -> int:
        """Rollouts that may be finished or in flight, the one that the trainer waits for included.

        A group that is started now is trained on after those: with more, its tokens would be older than
        ``--max-weight-staleness``, if an update follows each rollout, or each --update-weights-interval of them.
        """
        ahead = self._config.selection.async_buffer_size or 1
        bound = self._config.selection.max_weight_staleness
        if bound is None:
            return ahead
        bound -= self._config.selection.update_weights_interval - 1
        # Between two rollouts the engines still have the version before the one that the next rollout is trained from.
        return min(ahead, bound + 1 if self._watch.is_waiting else bound)

    def _start(self, groups: list[Group]) -> None:
        for group in groups:
            self._started += 1
            work = _Work(group, self._prepared(copied_group(group)))
            self._running[work] = asyncio.get_running_loop().create_task(self._run(work))

    def _prepared(self, group: Group) -> Group:
        """Reset what came back older than allowed to its prompt; mask what goes on, if asked to."""
        prepared: Group = []
        for parts in by_trajectory(group).values():
            if self._age(parts) > self._most_age:
                self._counts["stale_samples"] += len(parts)
                parts = _prompts_of(parts)
            prepared += parts
        for sample in prepared:
            if sample.status is Status.ABORTED and sample.response_length:
                self._counts["continued_samples"] += 1
                if self._config.selection.mask_offpolicy_in_partial_rollout:
                    sample.loss_mask = [0] * sample.response_length
        return prepared

    async def _run(self, work: _Work) -> None:
        """Generate, score and judge a group; then start others in its place."""
        try:
            work.group = await self._pipeline.run(work.group, self._context, self._watch, work.finished)
            verdict = await self._judge(work.group)
        except (Exception, asyncio.CancelledError) as error:
            if self._running.pop(work, None) is not None:  # otherwise it was cancelled by `stop`
                self._failed(work, error)
            return
        if self._running.pop(work, None) is None:
            return
        try:
            self._take(work, verdict)
            if not self._context.stop.is_set():
                self._start(self._wanted())
        except Exception as error:  # the data source's or a hook's, which nobody else would see
            self._fail(error)
        self._changed.set()

    async def _judge(self, group: Group) -> Verdict | None:
        """No verdict on a group that was cut off."""
        if any(map(is_cut_off, group)):
            return None
        if not group:
            return Drop(EMPTY)
        if self._pipeline.is_unscored(group):
            return Drop(REWARD_FAILURE)
        return Keep() if self._keep is None else await self._keep.judge(group)

    def _failed(self, work: _Work, error: BaseException) -> None:
        number = work.handed_out[0].group_index
        if isinstance(error, asyncio.CancelledError):
            error = GenerationError(
                f"a function that worked on group {number} raised CancelledError, and nobody had cancelled it; look at "
                "what it awaits, and catch that there"
            )
        if not self._context.stop.is_set():
            self._fail(error)
            return
        # The rollout is complete without it, and a hook may fail because a response was cut off.
        logger.warning("group %d failed while it was stopped: %s", number, error)
        self._unfinished.append(_to_give_back(work))

    def _take(self, work: _Work, verdict: Verdict | None) -> None:
        ledger, kept = self._source.ledger, {sample.trajectory for sample in work.group}
        others = len(self._ready) + len(self._running)
        is_short = others < self._config.selection.rollout_batch_size
        if isinstance(verdict, Drop) and verdict.keep_when_insufficient and is_short:
            self._counts["dynamic_filter/kept_when_insufficient"] += 1
            verdict = Keep()
        if verdict is None:
            self._unfinished.append(work.group)
        elif isinstance(verdict, Drop):
            self._counts[f"dynamic_filter/drop_{verdict.reason}"] += 1
            ledger.settle([work.handed_out], Fate.FILTERED)
            self._examples.setdefault(verdict.reason, work.group)
            if self._context.turns is not None:
                self.settled.update(sample.trajectory for sample in work.handed_out)
            if self._config.hooks.rollout_all_samples_process_path is not None:
                self._dropped.append(work.group)
            self._watch.forget(len(work.group))
        elif self._age(work.group) > self._most_age:
            self._again(work)
        else:
            dropped = [sample for sample in work.handed_out if sample.trajectory not in kept]
            ledger.settle([dropped], Fate.FILTERED)
            ledger.replace_out([work.group])
            self._ready.append(work)

    def _drop_aged(self) -> None:
        """Generate waiting groups again that became older than allowed."""
        aged = [one for one in self._ready if self._age(one.group) > self._most_age]
        self._ready = [one for one in self._ready if one not in aged]
        for one in aged:
            self._again(one)

    def _again(self, aged: _Work) -> None:
        self._counts["stale_samples"] += len(aged.group)
        self._watch.forget(len(aged.group))
        if self._context.turns is not None:
            self._context.turns.drop(sample.trajectory for sample in aged.handed_out)
        group = _prompts_of(copied_group(aged.handed_out))
        self._source.ledger.replace_out([group])
        if self._context.stop.is_set():
            self._unfinished.append(group)
        elif self._started < self._most_tried:
            self._start([group])
        else:
            self._fail(self._too_many())

    @property
    def _most_age(self) -> float:
        bound = self._config.selection.max_weight_staleness
        return float("inf") if bound is None else bound

    def _age(self, samples: list[Sample]) -> int:
        """By how many versions the oldest token will be behind when it is trained on."""
        versions = [version for sample in samples for version in sample.weight_versions if version >= 0]
        return self._version - min(versions, default=self._version)

    async def _cut_off(self) -> None:
        """Abort all requests until nothing is in flight, or for half a minute."""
        deadline = time.monotonic() + _ABORT_SECONDS
        while self._running and time.monotonic() < deadline:
            await self._context.client.abort_all()
            if self._running:
                await asyncio.wait(list(self._running.values()), timeout=_ABORT_AGAIN_SECONDS)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()


def _to_give_back(work: _Work) -> Group:
    """The finished trajectories of a group that was stopped, and the others as they were handed out.

    It shares nothing with samples that a hook which was left behind may still write to.
    """
    finished, whole = by_trajectory(work.finished), []
    for number, handed_out in by_trajectory(work.handed_out).items():
        parts = finished.get(number, [])
        whole += handed_out if len(parts) < len(handed_out) else copied_group(parts)
    return whole


def _prompts_of(group: Group) -> Group:
    """The group before it was generated: one sample of each trajectory, without a response and what came of that."""
    prompts = [parts[0] for parts in by_trajectory(group).values()]
    for sample in prompts:
        begin_anew(sample)
        sample.metadata.pop(HOOKED, None)
        for key in FAILURES:
            withdraw(sample, key)
    return prompts
