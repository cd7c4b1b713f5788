"""Scoring 10,000 mathematical answers where 2% never end or take all memory, against scoring the others alone.

All go through `make_scorer` with `--rm-type math`, as the samples of a rollout do: 4 worker processes, 1 s and 1 GiB
for each answer. No two answers are alike, so nothing comes from the cache; every reward is checked. `over ideal` is the
time of all answers over that of the others alone plus what the pathological ones may take: their number times the time
limit, over the number of workers. `loop` is the longest time in which the event loop, and so generation, stood still.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from _records import Record

from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.rewards import make_scorer

GOAL = 1.2
ANSWERS, WORKERS, LIMIT, QUICK_LIMIT, GIB = 10_000, 4, 1.0, 3.0, 1.0
SHARE = 0.02
TICK = 0.001
PATHOLOGICAL = ("{n}!", "9^{{9^{{9^{{{n}}}}}}}", "\\sqrt{{{n}!}}", "\\sum_{{k=1}}^{{10^{{12}}}}\\frac{{1}}{{k+{n}}}")


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both.

    Args:
        out: Not used.
        quick: 500 answers, with 3 s for each, as another benchmark may run at the same time.
    """
    count, limit = (500, QUICK_LIMIT) if quick else (ANSWERS, LIMIT)
    bad = pathological(round(count * SHARE))
    good = ordinary(count - len(bad))
    both = [*good, *bad]
    random.Random(1).shuffle(both)
    alone, _ = score(good, limit)
    together, gap = score(both, limit)
    ideal = alone + len(bad) * limit / WORKERS
    case = f"{count:,} answers, {len(bad)} pathological"
    return [
        Record(case, "over ideal", together / ideal, "x", False, GOAL),
        Record(case, "time", together, "s", False),
        Record(case, "loop", 1e3 * gap, "ms", False),
        Record(f"{len(good):,} answers", "time", alone, "s", False),
    ]


def ordinary(count: int) -> list[tuple[Sample, float]]:
    """Fractions, half of them right, with their rewards."""
    pairs = []
    for number in range(count):
        p, q, right = 3 * number + 1, 7, number % 2 == 0
        response = f"so it is \\boxed{{\\frac{{{2 * p}}}{{{2 * q if right else q}}}}}"
        pairs.append((sample(response, f"{p}/{q}"), float(right)))
    return pairs


def pathological(count: int) -> list[tuple[Sample, float]]:
    """Answers that no verifier gets to the end of."""
    forms = [PATHOLOGICAL[number % len(PATHOLOGICAL)].format(n=10_000_000 + number) for number in range(count)]
    return [(sample(f"so it is \\boxed{{{form}}}", "12345/7"), 0.0) for form in forms]


def sample(response: str, label: str) -> Sample:
    """A sample that is ready to be scored."""
    return Sample(index=0, group_index=0, prompt="?", response=response, label=label)


def score(pairs: Sequence[tuple[Sample, float]], limit: float) -> tuple[float, float]:
    """Seconds for all of them at once, with a limit for each, and the event loop's longest pause in seconds."""
    config = RolloutConfig.of(
        hf_checkpoint="none",
        prompt_data="none",
        rollout_batch_size=1,
        rm_type="math",
        rm_workers=WORKERS,
        rm_timeout=limit,
        rm_memory_limit=GIB,
    )
    reward = make_scorer(config, HookArgs.from_configs(config)).reward

    async def work() -> tuple[list[object], float, float]:
        await reward(sample("\\boxed{1}", "1"))  # starts the processes
        start = time.perf_counter()
        rewards = asyncio.gather(*(reward(one) for one, _ in pairs))
        gap, latest = 0.0, time.perf_counter()
        while not rewards.done():
            await asyncio.sleep(TICK)
            gap, latest = max(gap, time.perf_counter() - latest - TICK), time.perf_counter()
        return list(rewards.result()), time.perf_counter() - start, gap

    rewards, seconds, gap = asyncio.run(work())
    wrong = [one.response for (one, right), got in zip(pairs, rewards, strict=True) if got != right]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(pairs)} rewards are wrong, that of {wrong[0]} first")
    unscored = sum("reward_failure" in one.metadata for one, _ in pairs)
    print(f"{len(pairs):,} answers in {seconds:.1f} s, {unscored} of them not scored", flush=True)
    return seconds, gap
