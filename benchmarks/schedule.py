"""8,192 samples to 64 ranks: the heaviest rank over its lower bound, and the milliseconds to get there.

Lengths are log-normal (median 2,000, sigma 1) up to 16,384 tokens; `one long` has one sample of twice the mean rank
load; `few per rank` has 512 samples. `balance` spreads them over the ranks; `LPT` (plain largest first) and
`differencing` (Karmarkar and Karp) are written here on the same numbers; `plan` goes on to micro-batches, equally many
on each rank; `step` does so from the samples, as a trainer's step is planned; `build_shards` is everything from scored
samples, as arrays, to what the ranks get; most of its time goes to copying 25 million numbers.

The bound is the mean load or the largest sample. With as many samples on each rank, the rank with the long one cannot
have fewer than the others: there the bound is the long one and the shortest. FLOPs are those of a model of 8 billion
weights. Times are CPU times, the best of several: all is plain Python in one thread. Goals: within 1 % of the bound,
under 50 ms.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from _records import Record

from slime_core.balance import balance, lower_bound
from slime_core.config import AlgorithmConfig
from slime_core.flops import FlopsModel
from slime_core.micro_batches import MicroBatchLimits, plan_micro_batches
from slime_core.schedule import ShardSpec, build_shards
from slime_core.step_plan import StepPlanner
from slime_core.types import RolloutBatch, RolloutColumns, Sample, Status, TrainShard

BOUND_GOAL, MILLISECONDS_GOAL = 1.01, 50.0
SAMPLES, RANKS, LONGEST, MEDIAN, SEED = 8192, 64, 16_384, 2000, 0
FEW = 512
MODEL = FlopsModel(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12_288,
    num_attention_heads=32,
    num_query_groups=8,
    head_dim=128,
    vocab_size=151_936,
)
LIMITS = {
    "under 16,384 tokens": MicroBatchLimits(tokens=LONGEST),
    "under 32,768 tokens, multiples of 4": MicroBatchLimits(tokens=2 * LONGEST, multiple=4),
    "8 samples each": MicroBatchLimits(samples=8),
}

Result = TypeVar("Result")
Bins = list[list[int]]


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure every case.

    Args:
        out: Not used.
        quick: Three repetitions instead of fifteen.
    """
    repeats = 3 if quick else 15
    records = []
    for name, lengths in workloads().items():
        flops = [MODEL.training(length) for length in lengths]
        records += spread(f"{name}, tokens", lengths, repeats)
        records += spread(f"{name}, FLOPs", flops, repeats)
        if len(lengths) == SAMPLES:
            for limit, limits in LIMITS.items():
                records += plan(f"{name}, {limit}", lengths, lengths, limits, repeats)
            records += plan(
                f"{name}, under 16,384 tokens, by FLOPs", lengths, flops, LIMITS[next(iter(LIMITS))], repeats
            )
            records += from_samples(name, lengths, 3 if quick else 5)
    return records


def workloads() -> dict[str, list[int]]:
    """Lengths by name."""
    generator = random.Random(SEED)
    lengths = [min(LONGEST, max(1, round(generator.lognormvariate(math.log(MEDIAN), 1)))) for _ in range(SAMPLES)]
    one_long = [*lengths]
    one_long[SAMPLES // 2] = 2 * sum(lengths) // RANKS
    return {"log-normal": lengths, "one long": one_long, "few per rank": lengths[:FEW]}


def spread(case: str, weights: Sequence[float], repeats: int) -> list[Record]:
    """Our balance, plain LPT, and differencing once."""
    ours, lpt = timed(lambda: balance(weights, RANKS), lambda: largest_first(weights, RANKS), repeats=repeats)
    (kk,) = timed(lambda: differencing(weights, RANKS), repeats=1)
    return [
        *figures(f"{case}: balance", weights, ours, bound=lower_bound(weights, RANKS)),
        *figures(f"{case}: LPT", weights, lpt),
        *figures(f"{case}: differencing", weights, kk),
        Record(case, "heaviest over LPT's", heaviest(weights, ours[0]) / heaviest(weights, lpt[0]), "x", False),
        Record(case, "time over LPT's", ours[1] / lpt[1], "x", False),
        Record(case, "heaviest over differencing's", heaviest(weights, ours[0]) / heaviest(weights, kk[0]), "x", False),
        Record(case, "time over differencing's", ours[1] / kk[1], "x", False),
    ]


def plan(
    case: str, lengths: Sequence[int], costs: Sequence[float], limits: MicroBatchLimits, repeats: int
) -> list[Record]:
    """Samples to ranks and micro-batches."""
    (result,) = timed(lambda: plan_micro_batches(lengths, ranks=RANKS, limits=limits, costs=costs), repeats=repeats)
    ranks = [list(chain(*micro_batches)) for micro_batches in result[0]]
    fewest = 1 if limits.tokens is None else math.ceil(sum(lengths) / RANKS / limits.tokens)
    bound = lower_bound(costs, RANKS)
    if limits.samples is not None:
        bound = max(bound, equal_counts_bound(costs, RANKS))
    records = figures(f"{case}: plan", costs, (ranks, result[1]), bound=bound)
    if limits.samples is None:
        count = len(result[0][0])
        records.append(
            Record(f"{case}: plan", "micro-batches over fewest", count / limits.round_up(fewest), "x", False)
        )
    return records


def from_samples(case: str, lengths: Sequence[int], repeats: int) -> list[Record]:
    """The way of a rollout: samples of 200 prompt tokens or fewer, in groups of 8, to micro-batches of 8."""
    samples = [
        Sample(
            index=index,
            group_index=index // 8,
            prompt="",
            tokens=[index % 1000] * length,
            response_length=max(0, length - 200),
            reward=float(index % 3),
            status=Status.COMPLETED,
        )
        for index, length in enumerate(lengths)
    ]
    batch = RolloutBatch(rollout_id=0, groups=[samples[start : start + 8] for start in range(0, len(samples), 8)])
    columns = batch.columns()
    ((shards, seconds),) = timed(lambda: shards_of(columns, RANKS), repeats=repeats)
    bins = [[sample.index for sample in shard.samples] for shard in shards]
    bound = max(lower_bound(lengths, RANKS), equal_counts_bound(lengths, RANKS))
    records = figures(f"{case}, 8 samples each: build_shards", lengths, (bins, seconds), bound=bound)
    records[-1] = dataclasses.replace(records[-1], goal=None)
    (everything,) = shards_of(columns, 1)
    for name, by_group in (("step", False), ("step with whole groups", True)):
        planner = StepPlanner(
            samples=everything.samples, ranks=RANKS, limits=LIMITS["8 samples each"], by_group=by_group
        )
        ((_, seconds),) = timed(lambda: planner.plan(range(len(lengths))), repeats=repeats)  # noqa: B023
        records.append(Record(f"{case}, 8 samples each: {name}", "time", seconds * 1e3, "ms", False, MILLISECONDS_GOAL))
    return records


def shards_of(batch: RolloutColumns, ranks: int) -> list[TrainShard]:
    """One step of the whole batch."""
    return build_shards(
        batch,
        ShardSpec(
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            data_parallel_size=ranks,
            micro_batch_size=8,
            global_batch_size=sum(batch.group_sizes),
        ),
    )


def figures(
    case: str, weights: Sequence[float], result: tuple[Bins, float], *, bound: float | None = None
) -> list[Record]:
    """The heaviest rank over its bound, and the time; with goals where a bound is given, which is for our sides."""
    bins, seconds = result
    over = heaviest(weights, bins) / (bound or lower_bound(weights, RANKS))
    return [
        Record(case, "heaviest over bound", over, "x", False, BOUND_GOAL if bound else None),
        Record(case, "time", seconds * 1e3, "ms", False, MILLISECONDS_GOAL if bound else None),
    ]


def equal_counts_bound(weights: Sequence[float], bins: int) -> float:
    """What a bin weighs at least that holds the largest item and as many items as all others."""
    ordered = sorted(weights)
    return ordered[-1] + sum(ordered[: len(weights) // bins - 1])


def heaviest(weights: Sequence[float], bins: Bins) -> float:
    """Load of the heaviest bin."""
    return max(sum(weights[item] for item in bin_) for bin_ in bins)


def largest_first(weights: Sequence[float], bins: int) -> Bins:
    """Plain LPT with a heap."""
    placed: Bins = [[] for _ in range(bins)]
    heap: list[tuple[float, int]] = [(0, index) for index in range(bins)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        load, index = heap[0]
        placed[index].append(item)
        heapq.heapreplace(heap, (load + weights[item], index))
    return placed


def differencing(weights: Sequence[float], bins: int) -> Bins:
    """Karmarkar and Karp 1982 for many bins: merge the two partitions that differ most, heavy bins onto light ones."""
    heap: list[tuple[float, int, list[tuple[float, Bins]]]] = []
    for item, weight in enumerate(weights):
        heap.append((-weight, item, [*[(0.0, list[list[int]]())] * (bins - 1), (weight, [[item]])]))
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a + b, x + y) for (a, x), (b, y) in pairs), key=lambda part: part[0])
        least = merged[0][0]
        heapq.heappush(heap, (least - merged[-1][0], number, [(load - least, items) for load, items in merged]))
    return [list(chain(*items)) for _, items in heap[0][2]]


def timed(*functions: Callable[[], Result], repeats: int) -> list[tuple[Result, float]]:
    """Results and least CPU seconds of functions that run in turn."""
    results = [function() for function in functions]
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, seconds, strict=True):
            start = time.process_time()
            function()
            taken.append(time.process_time() - start)
    return [(result, min(taken)) for result, taken in zip(results, seconds, strict=True)]
