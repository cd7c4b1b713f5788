"""The quick start's model and what a rank trains on in one of its steps, for benchmarks of that step."""

from __future__ import annotations

import random

import numpy as np

from slime_convert.shape import ModelShape
from slime_core.types import TrainSample, TrainShard, TrainStep

SHAPE = ModelShape(
    family="llama",
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_query_groups=3,
    kv_channels=64,
    vocab_size=49_152,
    max_position_embeddings=8192,
)
"""SmolLM2-135M's."""
PROMPT, RESPONSE, GROUPS, GROUP_SIZE = 40, 6, 16, 8


def rollout() -> TrainShard:
    """1,280 tokens with shared prompts, 768 of them trained."""
    return shard_of(samples_of(RESPONSE))


def samples_of(response: int) -> list[TrainSample]:
    """Random samples with so many response tokens, all trained; rewards have the mean 0 in each group."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(SHAPE.vocab_size) for _ in range(count)]

    prompts = [tokens(PROMPT) for _ in range(GROUPS)]
    return [
        TrainSample(
            index=index,
            group_index=index // GROUP_SIZE,
            tokens=np.array(prompts[index // GROUP_SIZE] + tokens(response), np.int32),
            response_length=response,
            loss_mask=np.ones(response, np.uint8),
            trajectory_tokens=response,
            reward=index % GROUP_SIZE - 3.5,
            raw_reward=float(index % GROUP_SIZE),
        )
        for index in range(GROUPS * GROUP_SIZE)
    ]


def shard_of(samples: list[TrainSample]) -> TrainShard:
    """All samples in one micro-batch of one step."""
    count, tokens = len(samples), sum(sample.trajectory_tokens for sample in samples)
    step = TrainStep(micro_batches=[list(range(count))], global_trajectories=count, global_tokens=tokens)
    return TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])
