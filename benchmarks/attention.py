"""Attention over a packed row against samples padded to the longest, and packing the row.

Heads and type are those of the quick start's model: 9 query heads, 3 key heads of 64 channels, bf16. `padded` is one
call of torch's scaled_dot_product_attention over whole samples filled up to the longest. Sides alternate. Times are CPU
seconds of the process, the least of the rounds; `extra` is by how much a call raises the resident size at most.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import torch
from _measure import Side, rounds_of
from _records import Record
from torch.nn.functional import scaled_dot_product_attention

from slime_core.types import TrainSample
from slime_megatron.model.attention import AttentionLayout, attend
from slime_megatron.model.packing import MicroBatch

HEADS, KEY_HEADS, CHANNELS = 9, 3, 64


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure elements, times and packing.

    Args:
        out: Not used.
        quick: One round instead of five.
    """
    lengths = np.random.default_rng(0).lognormal(math.log(1000), 1, 64).astype(int).clip(16, 16_000).tolist()
    rounds = 1 if quick else 5
    records = []
    for share in ("off", "on"):
        case = f"64 log-normal, {'shared' if share == 'on' else 'unshared'}"
        layout = MicroBatch(samples(200, lengths, 64), share_prompts=share).pack().attention
        computed = sum(product.num_scores for product in layout.products)
        records.append(Record(case, "scores / needed", computed / needed(layout), "x", more_is_better=False, goal=1.1))
    groups = 1 + 130_000 // 10_000
    for case, given in (
        ("130k tokens, long", samples(2000, [1000] * 8 * groups, 8)),
        ("130k tokens, short", samples(40, [45] * 2800, 8)),
    ):
        records.append(Record(case, "pack", 1000 * packing_seconds(given, rounds), "ms", more_is_better=False, goal=50))
    records += timed("quick start", samples(40, [6] * 128, 8), "on", rounds)
    # A quarter of them, and a quarter as long: padded, all would take hours.
    records += timed("16 log-normal", samples(50, [length // 4 for length in lengths[:16]], 16), "off", rounds)
    return records


def timed(case: str, given: list[TrainSample], share: str, rounds: int) -> list[Record]:
    """Forward and backward pass of both sides."""
    torch.manual_seed(0)
    layout = MicroBatch(given, share_prompts=share).pack().attention
    longest = max(len(sample.tokens) - 1 for sample in given)
    packed, padded = (
        [torch.randn(*size, heads, CHANNELS).bfloat16().requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        for size in ([layout.num_keys], [len(given), longest])
    )

    def run_packed() -> None:
        query, key, value = packed
        torch.autograd.backward(attend(query, key, value, layout).sum())

    def run_padded() -> None:
        query, key, value = (tensor.transpose(1, 2) for tensor in padded)
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.autograd.backward(output.sum())

    def clear() -> None:
        for tensor in (*packed, *padded):
            tensor.grad = None

    sides: dict[str, Side] = {"packed": run_packed, "padded": run_padded}
    figures = rounds_of(sides, clear, rounds)
    records = []
    for side, measured in figures.items():
        records.append(Record(f"{case}, {side}", "time", measured["seconds"], "s", more_is_better=False))
        records.append(Record(f"{case}, {side}", "extra", measured["extra"] / 2**20, "MiB", more_is_better=False))
    ratio = figures["packed"]["seconds"] / figures["padded"]["seconds"]
    return [*records, Record(f"{case}, packed / padded", "time", ratio, "x", more_is_better=False, goal=1.0)]


def packing_seconds(given: list[TrainSample], rounds: int) -> float:
    """CPU seconds to lay samples out with shared prompts, with the attention's pieces; the least of the rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        batch = MicroBatch(given, share_prompts="on").pack()
        assert batch.attention.products
        seconds.append(time.process_time() - start)
    return min(seconds)


def needed(layout: AttentionLayout) -> int:
    """Pairs of a query and a key that it sees."""
    own: int = sum(run * (run + 1) // 2 for run in layout.runs.tolist())
    return own + sum(one.length * len(one.keys) for one in layout.continuations)


def samples(prompt: int, responses: list[int], per_group: int) -> list[TrainSample]:
    """Samples with a prompt of so many tokens."""
    return [
        TrainSample(
            index=index,
            group_index=index // per_group,
            tokens=np.ones(prompt + length, np.int32),
            response_length=length,
            loss_mask=np.ones(length, np.uint8),
            trajectory_tokens=length,
            reward=1.0,
            raw_reward=1.0,
        )
        for index, length in enumerate(responses)
    ]
