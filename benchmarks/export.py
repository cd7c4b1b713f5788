"""How fast the trainer's weights leave it, against copying as many bytes, and the memory that this takes.

SmolLM2-135M's shape with random weights in bf16, one rank, buckets of 64 MiB. `export` is `push` to a channel that
copies each bucket into one buffer, as those do that share memory with an engine; `memcpy` copies the model's tensors in
such buckets into the same buffer, each with one thread. Sides alternate. `rate` is by CPU seconds of the process, `wall
rate` by the clock, in which gathering and sending overlap; the least of the rounds. `extra` is by how much a call
raises the resident size at most, in buckets: with this channel, and with one that copies every bucket eight times, so
that the next one has always been gathered before (`two in flight`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from _measure import Side, measure
from _quickstart_step import SHAPE
from _records import Record

from slime_core.config import AlgorithmConfig
from slime_core.interfaces import NamedTensors
from slime_core.types import Rendezvous, WeightUpdate
from slime_megatron.service import MegatronConfig, start_worker

BUCKET = 64 << 20
RATE_GOAL, EXTRA_GOAL = 0.6, 2.0


class CopyingChannel:
    """Copies buckets into one buffer."""

    def __init__(self, times: int = 1) -> None:
        self._buffer = torch.zeros(BUCKET, dtype=torch.uint8)
        self._times = times
        self.sent = 0

    def begin(self, update: WeightUpdate) -> None:
        """Count from 0."""
        self.sent = 0

    def send(self, bucket: NamedTensors) -> int:
        """Copy its tensors, one behind the other."""
        for _ in range(self._times):
            place = 0
            for _, tensor in bucket:
                flat = tensor.detach().reshape(-1).view(torch.uint8)
                self._buffer[place : place + len(flat)].copy_(flat)
                place += len(flat)
        self.sent += place
        return place

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
    config = MegatronConfig(bf16=True, update_weight_buffer_size=BUCKET, trainer_threads=1)
    worker = start_worker(config, AlgorithmConfig(), SHAPE, meeting)
    from slime_megatron.weights.sync import _buckets  # Megatron-core may not be imported before the worker is made

    channel, copier, slow = CopyingChannel(), CopyingChannel(), CopyingChannel(times=8)
    weights = list(worker.model[0].named_parameters())
    buckets = list(_buckets(iter(weights), BUCKET))

    def copy() -> None:
        for bucket in buckets:
            copier.send(bucket)

    def export() -> None:
        worker.push(WeightUpdate(version=1), channel)

    def export_slowly() -> None:
        worker.push(WeightUpdate(version=1), slow)

    sides: dict[str, Side] = {"export": export, "memcpy": copy}
    for warm_up in sides.values():
        warm_up()
    total = sum(tensor.nbytes for _, tensor in weights)
    assert channel.sent == total
    taken = times(sides, 3 if quick else 15)
    extra = {"export": measure(export)[1], "export, two in flight": measure(export_slowly)[1]}
    worker.close()
    records = []
    for name, (cpu, wall) in taken.items():
        records.append(Record(name, "rate", total / cpu / 1e9, "GB/s", True))
        records.append(Record(name, "wall rate", total / wall / 1e9, "GB/s", True))
    (own_cpu, own_wall), (copy_cpu, copy_wall) = taken["export"], taken["memcpy"]
    return [
        *records,
        Record("export / memcpy", "rate", copy_cpu / own_cpu, "x", True, RATE_GOAL),
        Record("export / memcpy", "wall rate", copy_wall / own_wall, "x", True, RATE_GOAL),
        *(Record(name, "extra", size / BUCKET, "buckets", False, EXTRA_GOAL) for name, size in extra.items()),
    ]


def times(sides: Mapping[str, Side], rounds: int) -> dict[str, tuple[float, float]]:
    """Run all sides in turn, several times: the least CPU and wall seconds of each."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            found[name].append((cpu, wall))
            print(f"round {number}: {name}: {wall:.3f} s, CPU {cpu:.3f} s", flush=True)
    return {name: (min(cpu for cpu, _ in each), min(wall for _, wall in each)) for name, each in found.items()}
