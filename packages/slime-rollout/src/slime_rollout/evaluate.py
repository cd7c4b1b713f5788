"""Evaluation: all prompts of the held-out sets, answered and scored with the same seeds every time."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.metrics import eval_metrics, eval_scores
from slime_core.types import EvalReport, Group, Sample
from slime_rollout.data import PromptDataset, PromptEncoder
from slime_rollout.errors import REWARD_FAILURE, RewardError
from slime_rollout.eval_sets import EvalSet
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams, number_parts
from slime_rollout.hooks.rollouts import RolloutHooks, SampleHooks
from slime_rollout.limits import ModelLimits
from slime_rollout.pipeline import GroupPipeline, Progress, Stopwatch
from slime_rollout.rewards import Scorers
from slime_rollout.rewards.rules import ROW_KEY, check_scoring
from slime_rollout.threads import all_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeldOutPrompts:
    """A held-out set with its prompts, tokenized."""

    held_out: EvalSet
    prompts: PromptDataset

    @classmethod
    def load(cls, held_out: EvalSet, tokenizer: Any) -> HeldOutPrompts:
        """Read and tokenize a set. `DataError`: it breaks its format, or ``metadata_overrides`` names an unfit rule."""
        config = held_out.config
        with held_out.named():
            encoder = PromptEncoder.of(config, tokenizer)
            loaded = cls(held_out=held_out, prompts=PromptDataset.load(held_out.path, config, encoder))
            loaded._check_rule()
            return loaded

    def _check_rule(self) -> None:
        """Check the rule that ``metadata_overrides`` names; those of the rows were checked when they were read."""
        overrides = self.held_out.metadata_overrides
        if ROW_KEY not in overrides:
            return
        for place, (sample, *_) in enumerate(self.groups(), 1):
            if problem := check_scoring(self.held_out.config, overrides, sample.label):
                raise DataError(f"metadata_overrides, prompt {place} of {self.held_out.path}: {problem}")

    def groups(self) -> list[Group]:
        """Fresh samples of every prompt, with the same numbers every time."""
        groups = self.prompts.groups(self.held_out.n_samples_per_eval_prompt)
        for sample in (sample for group in groups for sample in group):
            sample.metadata |= copy.deepcopy(dict(self.held_out.metadata_overrides))
        return groups


class Evaluator:
    """Answers and scores held-out sets, all at once, without the data that is trained on.

    Every set has its own stream of seeds, ``eval/<name>``. ``on_progress`` is called after each sample, with the number
    of scored samples and of all samples.
    """

    def __init__(
        self,
        sets: Sequence[HeldOutPrompts],
        *,
        scorers: Scorers,
        run_seed: int,
        tokenizer: Any,
        hook_args: HookArgs,
        sample_hooks: SampleHooks,
        hooks: RolloutHooks,
        on_progress: Progress | None = None,
    ) -> None:
        self._hooks = hooks
        self._sets: list[tuple[HeldOutPrompts, GroupPipeline]] = []
        for one in sets:
            config = one.held_out.config
            with one.held_out.named():
                self._sets.append((one, GroupPipeline(config, scorers.of(config), hooks=sample_hooks)))
        self._make_context = functools.partial(
            GenerationContext, run_seed=run_seed, tokenizer=tokenizer, args=hook_args
        )
        self._on_progress = on_progress

    async def evaluate(self, rollout_id: int, client: EngineClient) -> EvalReport:
        """Score all sets, after ``rollout_id`` rollouts were trained on. Errors name the set."""
        start = time.perf_counter()
        groups = [one.groups() for one, _ in self._sets]
        watch = Stopwatch(sum(len(group) for part in groups for group in part), self._on_progress)
        work = [
            self._score(client, one.held_out, pipeline, part, watch)
            for (one, pipeline), part in zip(self._sets, groups, strict=True)
        ]
        keys = {one.held_out.name: one.held_out.config.rewards.reward_key for one, _ in self._sets}
        samples: dict[str, list[Sample]] = dict(zip(keys, await all_of(work), strict=True))
        metrics: dict[str, float] = {}
        for name, scored in samples.items():
            metrics |= eval_metrics(name, scored, keys[name])
        return EvalReport(
            rollout_id=rollout_id,
            scores=eval_scores(metrics),
            metrics=await self._hooks.log_eval(rollout_id, samples, metrics, keys.__getitem__),
            samples=samples,
            seconds=time.perf_counter() - start,
        )

    async def _score(
        self, client: EngineClient, held_out: EvalSet, pipeline: GroupPipeline, groups: list[Group], watch: Stopwatch
    ) -> list[Sample]:
        params, stream = SamplingParams.for_evaluation(held_out), f"eval/{held_out.name}"
        limits = ModelLimits.of(held_out.config.data.hf_checkpoint)
        context = self._make_context(client=client, params=params, stream=stream, limits=limits)
        with held_out.named():
            done = await all_of([pipeline.run(group, context, watch) for group in groups])
        number_parts(done, itertools.count(sum(map(len, groups))).__next__)
        scored = [group for group in done if not pipeline.is_unscored(group)]
        if unscored := len(done) - len(scored):
            logger.warning("held-out set %s: %d of %d prompts could not be scored", held_out.name, unscored, len(done))
        if unscored and not scored:
            reasons = [sample.metadata.get(REWARD_FAILURE) for group in done for sample in group]
            raise RewardError(
                f"held-out set {held_out.name}: none of its {unscored} prompts could be scored: "
                f"{next(filter(None, reasons))}"
            )
        return [sample for group in scored for sample in group]
