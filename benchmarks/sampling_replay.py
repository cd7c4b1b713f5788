"""What sampling replay costs: a train step over kept tokens against one over the whole vocabulary, and bytes per token.

SmolLM2-135M's shape with random weights, one micro-batch of 16 prompts with 8 samples each, 16 trained tokens a sample.
`nucleus` keeps 1 to 200 tokens each, log-normal with a median of 4, as top-p may leave of a trained model; `top-k`
keeps 100. Sides alternate; times are CPU seconds of the process, the least of the rounds. Bytes are those of the
sample's text (`Sample.kept_tokens`) and of the arrays that reach the trainer, per trained token.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _measure import Side, rounds_of
from _quickstart_step import SHAPE, samples_of, shard_of
from _records import Record

from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous, TrainSample
from slime_core.types.kept import kept_text
from slime_core.types.train import KEPT_COUNTS, KEPT_IDS
from slime_launch.derived import computes_bfloat16
from slime_megatron.service import MegatronConfig, start_worker

RESPONSE, TOP_K = 16, 100
Sizes = Callable[[random.Random], int]
KINDS: dict[str, Sizes] = {
    "nucleus": lambda dice: min(200, max(1, round(dice.lognormvariate(1.4, 1.2)))),
    "top-k": lambda dice: TOP_K,
}


def main(out: Path, *, quick: bool) -> list[Record]:
    """Train with each in turn.

    Args:
        out: Not used.
        quick: One round instead of six, and a tenth of the layers.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=probe.getsockname()[1])
    config = MegatronConfig(bf16=computes_bfloat16(), share_prompts="on")
    shape = dataclasses.replace(SHAPE, num_layers=SHAPE.num_layers // 10) if quick else SHAPE
    worker = start_worker(config, AlgorithmConfig(), shape, meeting)
    samples, records = samples_of(RESPONSE), []
    shards = {"whole vocabulary": shard_of(samples)}
    for name, size in KINDS.items():
        sets = [kept_sets(sample, size) for sample in samples]
        text = sum(len(kept_text(of_sample)) for of_sample in sets)
        replayed = [with_kept(*pair) for pair in zip(samples, sets, strict=True)]
        arrays = sum(one.extras[KEPT_IDS].nbytes + one.extras[KEPT_COUNTS].nbytes for one in replayed)
        tokens = len(samples) * RESPONSE
        records += [
            Record(name, "kept", sum(len(kept) for of_sample in sets for kept in of_sample) / tokens, "tokens"),
            Record(name, "text", text / tokens, "bytes/token", more_is_better=False),
            Record(name, "arrays", arrays / tokens, "bytes/token", more_is_better=False),
        ]
        shards[name] = shard_of(replayed)
    sides: dict[str, Side] = {name: functools.partial(worker.train, shard) for name, shard in shards.items()}
    for warm_up in sides.values():
        warm_up()
    figures = rounds_of(sides, lambda: None, 1 if quick else 6)
    worker.close()
    whole = figures["whole vocabulary"]["seconds"]
    records.append(Record("whole vocabulary", "step", whole, "s", more_is_better=False))
    return records + [
        Record(name, "step / whole vocabulary", figures[name]["seconds"] / whole, "x", more_is_better=False)
        for name in KINDS
    ]


def kept_sets(sample: TrainSample, size: Sizes) -> list[list[int]]:
    """For each response token itself and others."""
    dice = random.Random(sample.index)
    response = sample.tokens[-RESPONSE:].tolist()
    return [[token, *(dice.sample(range(SHAPE.vocab_size), size(dice)))[1:]] for token in response]


def with_kept(sample: TrainSample, sets: list[list[int]]) -> TrainSample:
    """The sample with its kept tokens, none twice."""
    unique = [list(dict.fromkeys(kept)) for kept in sets]
    ids = np.array([one for kept in unique for one in kept], np.int32)
    counts = np.array(list(map(len, unique)), np.int32)
    return dataclasses.replace(sample, extras={KEPT_IDS: ids, KEPT_COUNTS: counts})
