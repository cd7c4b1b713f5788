"""Evaluation: all prompts of the held-out sets, answered and scored with the same seeds every time."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.metrics import eval_metrics, eval_scores
from slime_core.types import EvalReport, Group, Sample
from slime_rollout.data import PromptDataset, PromptEncoder
from slime_rollout.eval_sets import EvalSet
from slime_rollout.generate import EngineClient, GenerationContext, SamplingParams, make_generate, number_parts
from slime_rollout.pipeline import GroupPipeline, Progress, Stopwatch, all_of
from slime_rollout.rewards import Scorers
from slime_rollout.rewards.rules import ROW_KEY, check_scoring


@dataclass(frozen=True, kw_only=True)
class HeldOutPrompts:
    """A held-out set with its prompts, tokenized."""

    held_out: EvalSet
    prompts: PromptDataset

    @classmethod
    def load(cls, held_out: EvalSet, tokenizer: Any) -> HeldOutPrompts:
        """Read and tokenize a set.

        Raises:
            ConfigError: The tokenizer has no chat template and the set asks for one.
            DataError: The file breaks its format, or a rule of ``metadata_overrides`` does not fit it.
        """
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
        for place in range(len(self.prompts)):
            (sample,) = self.prompts.group(place, group_index=place, first_index=place, size=1)
            if problem := check_scoring(self.held_out.config, overrides, sample.label):
                raise DataError(f"metadata_overrides, prompt {place + 1} of {self.held_out.path}: {problem}")

    def groups(self) -> list[Group]:
        """Fresh samples of every prompt, with the same numbers every time."""
        size = self.held_out.n_samples_per_eval_prompt
        groups = [
            self.prompts.group(place, group_index=place, first_index=place * size, size=size)
            for place in range(len(self.prompts))
        ]
        for sample in (sample for group in groups for sample in group):
            sample.metadata |= copy.deepcopy(dict(self.held_out.metadata_overrides))
        return groups


class Evaluator:
    """Answers and scores held-out sets, all at once, without the data that is trained on.

    Args:
        sets: The sets.
        scorers: The scorers of the sets.
        run_seed: Seed of the run; every set has its own stream, ``eval/<name>``.
        tokenizer: The model's.
        hook_args: Every flag by its name.
        on_progress: Called with the number of scored samples and of all samples, after each one.
    """

    def __init__(
        self,
        sets: Sequence[HeldOutPrompts],
        *,
        scorers: Scorers,
        run_seed: int,
        tokenizer: Any,
        hook_args: HookArgs,
        on_progress: Progress | None = None,
    ) -> None:
        self._sets = list(sets)
        self._pipelines = [_pipeline(one.held_out, scorers) for one in self._sets]
        self._run_seed = run_seed
        self._tokenizer = tokenizer
        self._hook_args = hook_args
        self._on_progress = on_progress

    async def evaluate(self, rollout_id: int, client: EngineClient) -> EvalReport:
        """Score all sets. Errors name the set.

        Args:
            rollout_id: Rollouts trained on before.
            client: Where requests go.
        """
        start = time.perf_counter()
        samples = await self._score_all(client)
        metrics: dict[str, float] = {}
        for one in self._sets:
            name, config = one.held_out.name, one.held_out.config
            metrics |= eval_metrics(name, samples[name], config.rewards.reward_key)
        return EvalReport(
            rollout_id=rollout_id,
            scores=eval_scores(metrics),
            metrics=metrics,
            samples=samples,
            seconds=time.perf_counter() - start,
        )

    async def _score_all(self, client: EngineClient) -> dict[str, list[Sample]]:
        """The scored samples of each set, by its name."""
        groups = [one.groups() for one in self._sets]
        watch = Stopwatch(sum(len(group) for part in groups for group in part), self._on_progress)
        parts = zip(self._sets, self._pipelines, groups, strict=True)
        scored = await all_of([self._score(client, *part, watch) for part in parts])
        return {one.held_out.name: part for one, part in zip(self._sets, scored, strict=True)}

    async def _score(
        self,
        client: EngineClient,
        one: HeldOutPrompts,
        pipeline: GroupPipeline,
        groups: Sequence[Group],
        watch: Stopwatch,
    ) -> list[Sample]:
        context = GenerationContext(
            client=client,
            params=SamplingParams.for_evaluation(one.held_out),
            run_seed=self._run_seed,
            stream=f"eval/{one.held_out.name}",
            tokenizer=self._tokenizer,
            args=self._hook_args,
        )
        with one.held_out.named():
            done = await all_of([pipeline.run(group, context, watch) for group in groups])
        number_parts(done, itertools.count(sum(map(len, groups))).__next__)
        return [sample for group in done for sample in group]


def _pipeline(held_out: EvalSet, scorers: Scorers) -> GroupPipeline:
    config = held_out.config
    scorer = scorers.of(config)
    with held_out.named():
        generate = make_generate(config)
    return GroupPipeline(generate, scorer.reward, scorer.group_reward, reward_key=config.rewards.reward_key)
