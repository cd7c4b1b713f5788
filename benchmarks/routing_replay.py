"""What routing replay costs: a train step with given experts against one with the routers' own, and bytes per token.

A small model with experts (8 layers, 4 of 32 experts for a token) and random weights; one micro-batch of 16 prompts
with 8 samples each, 16 trained tokens a sample. `decode` is from the samples' text to arrays. Sides alternate; times
are CPU seconds of the process, the least of the rounds. Bytes are those of the sample's text
(`Sample.routed_experts`) and of the arrays that reach the trainer, per token of the sample.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _measure import Side, rounds_of
from _quickstart_step import SHAPE, samples_of, shard_of
from _records import Record

from slime_convert.published import PUBLISHED
from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous, TrainSample
from slime_core.types.routed import routed_rows, routed_text
from slime_core.types.train import ROUTED_EXPERTS
from slime_launch.derived import computes_bfloat16
from slime_megatron.service import MegatronConfig, start_worker

if TYPE_CHECKING:
    from slime_megatron.worker import MegatronWorker

RESPONSE = 16
MODEL = dataclasses.replace(
    PUBLISHED["qwen3-30B-A3B"].shape,
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=64,
    vocab_size=SHAPE.vocab_size,
    num_experts=32,
    moe_router_topk=4,
    moe_ffn_hidden_size=256,
)


def main(out: Path, *, quick: bool) -> list[Record]:
    """Train with each in turn.

    Args:
        out: Not used.
        quick: One round instead of six, and a quarter of the layers.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=probe.getsockname()[1])
    config = MegatronConfig(bf16=computes_bfloat16(), share_prompts="on")
    shape = dataclasses.replace(MODEL, num_layers=MODEL.num_layers // 4) if quick else MODEL
    worker = start_worker(config, AlgorithmConfig(), shape, meeting)
    samples = samples_of(RESPONSE)
    replayed = [with_own_experts(worker, shape.num_layers, sample) for sample in samples]
    texts = [routed_text(sample.extras[ROUTED_EXPERTS]) for sample in replayed]
    tokens = sum(len(sample.tokens) for sample in samples)
    sides: dict[str, Side] = {
        "own experts": functools.partial(worker.train, shard_of(samples)),
        "given experts": functools.partial(worker.train, shard_of(replayed)),
        "decode": lambda: [routed_rows("a sample", text) for text in texts],
    }
    for warm_up in sides.values():
        warm_up()
    figures = rounds_of(sides, lambda: None, 1 if quick else 6)
    worker.close()
    own = figures["own experts"]["seconds"]
    arrays = sum(sample.extras[ROUTED_EXPERTS].nbytes for sample in replayed)
    return [
        Record("text", "size", sum(map(len, texts)) / tokens, "bytes/token", more_is_better=False),
        Record("arrays", "size", arrays / tokens, "bytes/token", more_is_better=False),
        Record("own experts", "step", own, "s", more_is_better=False),
        Record("given experts", "step / own", figures["given experts"]["seconds"] / own, "x", more_is_better=False),
        Record("decode", "step / own", figures["decode"]["seconds"] / own, "x", more_is_better=False),
    ]


def with_own_experts(worker: MegatronWorker, layers: int, sample: TrainSample) -> TrainSample:
    """The sample with the experts that the routers choose for its inputs: both sides then have the same work."""
    from slime_megatron.model.build import run
    from slime_megatron.model.packing import MicroBatch
    from slime_megatron.model.routing import Routing

    [chunk], made = worker.model, Routing(recording=True)
    with torch.no_grad():
        run(chunk, dataclasses.replace(MicroBatch([sample], share_prompts="off").pack(), routing=made))
    rows_TLK = torch.stack([made.recorded[layer] for layer in range(layers)], dim=1)
    rows = rows_TLK.flatten(1).numpy().astype(np.uint8)
    return dataclasses.replace(sample, extras={ROUTED_EXPERTS: rows})
