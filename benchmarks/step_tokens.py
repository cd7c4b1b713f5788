"""What of a step's packed tokens is useful, and how unequal ranks are once half of the groups are left out.

A heavy-tailed mix: 64 prompts of 8 responses, log-normal lengths (prompts: median 200; responses: median 500, sigma 1,
up to 8,000), on 4 data-parallel ranks under 16,384 tokens a micro-batch, rows padded to multiples of 8. In every second
group all rewards are equal, as happens early in training: it adds nothing to the loss. `useful / processed` counts each
prompt of a group once, and each response without its last token; processed are all tokens of the rows, fillers and
padding too. `imbalance` is the heaviest rank's processed tokens over the mean. `before` leaves the groups out on each
rank, after the ranks were balanced with them, as the trainer once did.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from _records import Record

from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, Status, TrainSample, TrainShard
from slime_megatron.model.packing import MicroBatch

GROUPS, GROUP_SIZE, RANKS, LIMIT, MULTIPLE = 64, 8, 4, 16_384, 8
USEFUL_GOAL, IMBALANCE_GOAL = 0.97, 0.03


def main(out: Path, *, quick: bool) -> list[Record]:
    """Count.

    Args:
        out: Not used.
        quick: One mix; otherwise five, and the worst counts.
    """
    useful, imbalance, before = [], [], []
    for seed in range(1 if quick else 5):
        batch = mix(random.Random(seed))
        shards = split(batch, drop=True)
        processed = [processed_tokens(shard) for shard in shards]
        useful.append(useful_tokens([sample for shard in shards for sample in shard.samples]) / sum(processed))
        imbalance.append(excess(processed))
        before.append(excess([processed_tokens(shard) for shard in split(batch, drop=False)]))
    return [
        Record("half of the groups left out", "useful / processed", min(useful), "tokens", True, USEFUL_GOAL),
        Record("half of the groups left out", "imbalance", max(imbalance), "of the mean", False, IMBALANCE_GOAL),
        Record("before", "imbalance", max(before), "of the mean", False),
    ]


def mix(generator: random.Random) -> RolloutBatch:
    """A rollout; every second group has equal rewards."""
    groups = []
    for group in range(GROUPS):
        prompt = max(8, round(generator.lognormvariate(math.log(200), 1)))
        tokens = [generator.randrange(1000) for _ in range(min(prompt, 2000))]
        samples = []
        for member in range(GROUP_SIZE):
            length = min(8000, max(2, round(generator.lognormvariate(math.log(500), 1))))
            samples.append(
                Sample(
                    index=group * GROUP_SIZE + member,
                    group_index=group,
                    prompt="",
                    tokens=tokens + [1] * length,
                    response_length=length,
                    reward=float(member % 2) if group % 2 else 1.0,
                    status=Status.COMPLETED,
                )
            )
        groups.append(samples)
    return RolloutBatch(rollout_id=0, groups=groups)


def split(batch: RolloutBatch, *, drop: bool) -> list[TrainShard]:
    """One step over the ranks."""
    return build_shards(
        batch,
        ShardSpec(
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            data_parallel_size=RANKS,
            micro_batch_size=1,
            global_batch_size=GROUPS * GROUP_SIZE,
            keep_groups_together=True,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=LIMIT,
            drop_untrained=drop,
        ),
    )


def processed_tokens(shard: TrainShard) -> int:
    """Tokens of the rows that a rank computes, without samples of no advantage; a row without any is a filler."""
    [step] = shard.steps
    total = 0
    for positions in step.micro_batches:
        chosen = [shard.samples[position] for position in positions]
        trained = [sample for sample in chosen if sample.reward and sample.loss_mask.any()]
        total += len(MicroBatch(trained, multiple_of=MULTIPLE).pack().tokens_T)
    return total


def useful_tokens(samples: list[TrainSample]) -> int:
    """Tokens that a step cannot do without: each prompt of a group once."""
    trained = [sample for sample in samples if sample.reward and sample.loss_mask.any()]
    prompts = {sample.group_index: sample.prompt_length for sample in trained}
    return sum(prompts.values()) + sum(sample.response_length - 1 for sample in trained)


def excess(loads: list[int]) -> float:
    """By how much the heaviest is above the mean, over it."""
    return max(loads) * len(loads) / sum(loads) - 1
