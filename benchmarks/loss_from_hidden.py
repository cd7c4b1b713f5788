"""A train step of the quick start's model: its loss from hidden states, as the trainer takes it, against from logits.

SmolLM2-135M's shape with random weights, bf16, one micro-batch of 16 prompts with 8 samples each. Sides alternate.
Times are CPU seconds of the process, the least of the rounds; `extra` is by how much a step raises the resident size at
most.
"""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _measure import Side, rounds_of
from _quickstart_step import SHAPE, rollout
from _records import Record

from slime_core.config import AlgorithmConfig
from slime_core.ops import log_probs_and_entropy
from slime_core.types import Rendezvous
from slime_megatron.service import MegatronConfig, start_worker

if TYPE_CHECKING:  # it imports Megatron, which a worker does once the device is chosen
    from slime_megatron.model.packing import PackedBatch


def main(out: Path, *, quick: bool) -> list[Record]:
    """Train with either loss in turn.

    Args:
        out: Not used.
        quick: Two rounds instead of eight, and a tenth of the layers.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=probe.getsockname()[1])
    shape = dataclasses.replace(SHAPE, num_layers=SHAPE.num_layers // 10) if quick else SHAPE
    worker = start_worker(MegatronConfig(bf16=True, share_prompts="on"), AlgorithmConfig(), shape, meeting)
    from slime_megatron.model.build import output_weight
    from slime_megatron.step.passes import Head

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
