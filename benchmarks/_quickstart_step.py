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
    """1,280 tokens with shared prompts, 768 of them trained; rewards have the mean 0 in each group."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(SHAPE.vocab_size) for _ in range(count)]

    prompts = [tokens(PROMPT) for _ in range(GROUPS)]
    samples = [
        TrainSample(
            index=index,
            group_index=index // GROUP_SIZE,
            tokens=np.array(prompts[index // GROUP_SIZE] + tokens(RESPONSE), np.int32),
            response_length=RESPONSE,
            loss_mask=np.ones(RESPONSE, np.uint8),
            trajectory_tokens=RESPONSE,
            reward=index % GROUP_SIZE - 3.5,
            raw_reward=float(index % GROUP_SIZE),
        )
        for index in range(GROUPS * GROUP_SIZE)
    ]
    count = len(samples)
    step = TrainStep(micro_batches=[list(range(count))], global_trajectories=count, global_tokens=count * RESPONSE)
    return TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])
