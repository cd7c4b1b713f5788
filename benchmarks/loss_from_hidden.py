"""A train step of the quick start's model: its loss from hidden states, as the trainer takes it, against from logits.

SmolLM2-135M's shape with random weights, bf16, one micro-batch of 16 prompts with 8 samples each. Sides alternate.
Times are CPU seconds of the process, the least of the rounds; `extra` is by how much a step raises the resident size at
most.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _measure import Side, rounds_of
from _records import Record

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.ops import log_probs_and_entropy
from slime_core.types import Rendezvous, TrainSample, TrainShard, TrainStep
from slime_megatron.config import MegatronConfig
from slime_megatron.start import start_worker

if TYPE_CHECKING:  # it imports Megatron, which a worker does once the device is chosen
    from slime_megatron.packing import PackedBatch

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


def main(out: Path, *, quick: bool) -> list[Record]:
    """Train with either loss in turn.

    Args:
        out: Not used.
        quick: Two rounds instead of eight.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=probe.getsockname()[1])
    worker = start_worker(MegatronConfig(bf16=True, share_prompts="on"), AlgorithmConfig(), SHAPE, meeting)
    from slime_megatron.model import output_weight
    from slime_megatron.step import Head

    shard, from_hidden = rollout(), Head.__call__

    def from_logits(
        head: Head, chunk: Any, hidden_1TD: torch.Tensor, batch: PackedBatch, *, with_entropy: bool = False
    ) -> Any:
        logits_MV = hidden_1TD[0].index_select(0, batch.logit_rows_M) @ output_weight(chunk).t()
        return log_probs_and_entropy(
            logits_MV, batch.targets_M, temperature=head.temperature, with_entropy=with_entropy, overwrite_logits=True
        )

    def step(take: Any) -> None:
        Head.__call__ = take  # type: ignore[method-assign]
        worker.train(shard)

    sides: dict[str, Side] = {"hidden states": lambda: step(from_hidden), "logits": lambda: step(from_logits)}
    for warm_up in sides.values():
        warm_up()
    figures = rounds_of(sides, lambda: None, 2 if quick else 8)
    worker.close()
    records = []
    for side, measured in figures.items():
        records.append(Record(side, "time", measured["seconds"], "s", more_is_better=False))
        records.append(Record(side, "extra", measured["extra"] / 2**20, "MiB", more_is_better=False))
    ratio = figures["hidden states"]["seconds"] / figures["logits"]["seconds"]
    return [*records, Record("hidden states / logits", "time", ratio, "x", more_is_better=False, goal=1.05)]


def rollout() -> TrainShard:
    """What a rank trains on in a step of the quick start: 1,280 tokens with shared prompts, 768 of them trained."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(SHAPE.vocab_size) for _ in range(count)]

    prompts = [tokens(40) for _ in range(16)]
    samples = [
        TrainSample(
            index=index,
            group_index=index // 8,
            tokens=np.array(prompts[index // 8] + tokens(6), np.int32),
            response_length=6,
            loss_mask=np.ones(6, np.uint8),
            trajectory_tokens=6,
            reward=index % 8 - 3.5,
            raw_reward=float(index % 8),
        )
        for index in range(128)
    ]
    step = TrainStep(micro_batches=[list(range(len(samples)))], global_trajectories=len(samples), global_tokens=768)
    return TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])
