"""How well a schedule uses its ranks: padding, imbalance and bubbles as named numbers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from slime_core.context_parallel import padded_length
from slime_core.errors import ConfigError, DataError
from slime_core.schedule import FILLER_INDEX
from slime_core.step_plan import Cost, token_count
from slime_core.types import TrainSample, TrainShard


def schedule_report(
    shards: Sequence[TrainShard],
    *,
    cost: Cost = token_count,
    max_tokens_per_gpu: int | None = None,
    context_parallel_size: int = 1,
    pad_multiple: int = 1,
    pipeline_size: int = 1,
    virtual_pipeline_size: int = 1,
) -> dict[str, float]:
    """Named numbers about a rollout's shards. A prompt that a trainer would share counts for each of its samples.

    - ``steps``; ``micro_batches``: on each rank, over all steps; ``empty_micro_batches``: those with only a filler.
    - ``tokens``: of the samples; ``padding_ratio``: share of the computed tokens that are padding or fillers.
    - ``cap_use``: mean of the micro-batches' tokens over the token limit; ``over_long_samples``: those above it. Only
      with ``max_tokens_per_gpu``.
    - ``rank_imbalance``: the heaviest rank's cost over the mean rank's, less 1.
    - ``rank_over_bound``: the heaviest rank's cost over its lower bound (the mean, or the costliest sample), less 1.
    - ``micro_batch_imbalance``: the costliest of the ranks' first, second … micro-batches, summed, over the mean rank's
      cost, less 1: what ranks lose that meet in every micro-batch, as expert parallelism makes them.
    - ``bubble_ratio``: share of a rank's time that its pipeline stages wait for the first and last micro-batch. With p
      stages and v virtual ones on each, that is (p − 1) / v times the costliest micro-batch: for equal micro-batches
      the (p − 1) / (v · m) of Narayanan et al. 2021, section 2.2; for others exact in a pipeline passed one way.
    - ``idle_ratio``: share of all ranks' time lost to bubbles and to waiting for the slowest rank at the step's end.

    Ratios over several steps weigh each step by its cost.

    Args:
        shards: Every rank's shard.
        cost: What computing a sequence of so many tokens costs; in units of it the ratios are measured.
        max_tokens_per_gpu: Token limit of a micro-batch per context-parallel rank, if there is one.
        context_parallel_size: Number of ranks that share each sequence.
        pad_multiple: What each rank's part of a sequence is padded to a multiple of.
        pipeline_size: p, the number of pipeline stages.
        virtual_pipeline_size: v, the number of virtual stages on each.

    Raises:
        ConfigError: A size is below 1.
        DataError: There are no shards, or they differ in their number of steps or micro-batches.
    """
    for name, size in (("pipeline size", pipeline_size), ("virtual-pipeline size", virtual_pipeline_size)):
        if size < 1:
            raise ConfigError(f"{name} {size} must be 1 or more")
    steps = _steps(shards)
    samples = [sample for shard in shards for sample in shard.samples if sample.index != FILLER_INDEX]
    computed = [
        [
            padded_length(len(sample.tokens), context_parallel_size=context_parallel_size, multiple=pad_multiple)
            for sample in micro_batch
        ]
        for micro_batch in chain.from_iterable(chain.from_iterable(steps))
    ]
    tokens, total = sum(len(sample.tokens) for sample in samples), sum(map(sum, computed))
    report = {
        "steps": float(len(steps)),
        "micro_batches": float(sum(len(step[0]) for step in steps)),
        "empty_micro_batches": float(sum(len(shard.samples) for shard in shards) - len(samples)),
        "tokens": float(tokens),
        "padding_ratio": 1 - tokens / total if total else 0.0,
    }
    if max_tokens_per_gpu is not None:
        cap = max_tokens_per_gpu * context_parallel_size
        report["cap_use"] = total / cap / max(1, len(computed))
        report["over_long_samples"] = float(sum(length > cap for length in chain.from_iterable(computed)))
    return report | _ratios(steps, cost, (pipeline_size - 1) / virtual_pipeline_size)


Step = list[list[list[TrainSample]]]
"""Samples per rank and micro-batch."""


def _steps(shards: Sequence[TrainShard]) -> list[Step]:
    counts = {tuple(len(step.micro_batches) for step in shard.steps) for shard in shards}
    if len(counts) != 1:
        raise DataError(f"shards must have equally many steps and micro-batches; theirs are {sorted(counts)}")
    return [
        [
            [[shard.samples[position] for position in positions] for positions in shard.steps[number].micro_batches]
            for shard in shards
        ]
        for number in range(len(shards[0].steps))
    ]


def _ratios(steps: Sequence[Step], cost: Cost, warm_up: float) -> dict[str, float]:
    """The ratios; ``warm_up`` is how many of its costliest micro-batch a rank's pipeline waits."""
    mean = heaviest = bound = lockstep = bubbles = loads = busiest = 0.0
    for step in steps:
        costs = [[sum(cost(len(sample.tokens)) for sample in members) for members in rank] for rank in step]
        largest = max((cost(len(sample.tokens)) for rank in step for members in rank for sample in members), default=0)
        rank_loads = [sum(rank) for rank in costs]
        rank_bubbles = [warm_up * max(rank, default=0) for rank in costs]
        mean += sum(rank_loads) / len(step)
        heaviest += max(rank_loads)
        bound += max(sum(rank_loads) / len(step), largest)
        lockstep += sum(map(max, zip(*costs, strict=True)))
        loads += sum(rank_loads)
        bubbles += sum(rank_bubbles)
        busiest += len(step) * max(load + bubble for load, bubble in zip(rank_loads, rank_bubbles, strict=True))
    if not loads:
        names = ("rank_imbalance", "rank_over_bound", "micro_batch_imbalance", "bubble_ratio", "idle_ratio")
        return dict.fromkeys(names, 0.0)
    return {
        "rank_imbalance": heaviest / mean - 1,
        "rank_over_bound": heaviest / bound - 1,
        "micro_batch_imbalance": lockstep / mean - 1,
        "bubble_ratio": bubbles / (loads + bubbles),
        "idle_ratio": 1 - loads / busiest,
    }
