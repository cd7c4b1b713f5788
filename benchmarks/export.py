"""How fast the trainer's weights leave it, against copying as many bytes, and the memory that this takes.

SmolLM2-135M's shape with random weights in bf16, one rank, buckets of 64 MiB. `export` is `push` to a channel that
copies each bucket into one buffer, as those do that share memory with an engine; `memcpy` copies the same tensors into
the same buffer. Sides alternate. Times are CPU seconds of the process, the least of the rounds; `extra` is by how much
a call raises the resident size at most, in buckets.
"""

from __future__ import annotations

import socket
from pathlib import Path

import torch
from _measure import Side, rounds_of
from _quickstart_step import SHAPE
from _records import Record

from slime_core.config import AlgorithmConfig
from slime_core.interfaces import NamedTensors
from slime_core.types import Rendezvous, WeightUpdate
from slime_megatron.config import MegatronConfig
from slime_megatron.start import start_worker

BUCKET = 64 << 20
RATE_GOAL, EXTRA_GOAL = 0.6, 2.0


class CopyingChannel:
    """Copies buckets into one buffer."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(BUCKET, dtype=torch.uint8)
        self.sent = 0

    def begin(self, update: WeightUpdate) -> None:
        """Count from 0."""
        self.sent = 0

    def send(self, bucket: NamedTensors) -> None:
        """Copy its tensors, one behind the other."""
        place = 0
        for _, tensor in bucket:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self._buffer[place : place + len(flat)].copy_(flat)
            place += len(flat)
        self.sent += place

    def end(self) -> dict[str, str]:
        """There are no checksums."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both sides.

    Args:
        out: Not used.
        quick: Three rounds instead of fifteen.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=probe.getsockname()[1])
    config = MegatronConfig(bf16=True, update_weight_buffer_size=BUCKET)
    worker = start_worker(config, AlgorithmConfig(), SHAPE, meeting)
    channel, copier = CopyingChannel(), CopyingChannel()
    weights = [(name, tensor) for name, tensor in worker.model[0].named_parameters()]

    def copy() -> None:
        for item in weights:
            copier.send([item])

    def export() -> None:
        worker.push(WeightUpdate(version=1), channel)

    sides: dict[str, Side] = {"export": export, "memcpy": copy}
    for warm_up in sides.values():
        warm_up()
    total = sum(tensor.nbytes for _, tensor in weights)
    assert channel.sent == total
    figures = rounds_of(sides, lambda: None, 3 if quick else 15)
    worker.close()
    rate = {name: total / measured["seconds"] / 1e9 for name, measured in figures.items()}
    return [
        *(Record(name, "rate", value, "GB/s", True) for name, value in rate.items()),
        Record("export / memcpy", "rate", rate["export"] / rate["memcpy"], "x", True, RATE_GOAL),
        Record("export", "extra", figures["export"]["extra"] / BUCKET, "buckets", False, EXTRA_GOAL),
    ]
