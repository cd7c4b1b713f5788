"""Where a worker's time goes, what it computes in it, and how much memory it takes."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_core.flops import FlopsModel
from slime_core.types import Span
from slime_megatron.model.packing import PackedBatch
from slime_megatron.ranks.device import Device

PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "H20": 148.0,
    "H800 PCIe": 756.0,
    "H800": 989.4,
    "L40S": 362.0,
    "MI300X": 1307.4,
}
"""Most operations per second in bfloat16 without sparsity, in units of 10¹², as the makers' data sheets have them.

A device's is that of the first name here that its own name contains.
"""


class PhaseTimer:
    """Adds up wall time, computed tokens and operations by phase, on this rank.

    Each phase is put into ``spans``, as of ``who``. ``synchronize`` waits for the device's queued work; ``flops`` are
    the model's operations.
    """

    def __init__(self, synchronize: Callable[[], None], flops: FlopsModel, spans: list[Span], who: str) -> None:
        self._synchronize = synchronize
        self._flops = flops
        self._spans, self._who = spans, who
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.operations: defaultdict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        began, start = time.time(), time.perf_counter()
        with torch.profiler.record_function(name):
            yield
            self._synchronize()
        elapsed = time.perf_counter() - start
        self.seconds[name] += elapsed
        self._spans.append(Span(self._who, name, began, elapsed))

    def count(self, name: str, packed: PackedBatch, *, logits: int, passes: int) -> None:
        """Count a micro-batch's tokens and operations under ``name``; it computes the logits of so many tokens.

        ``passes`` is 1 for a forward pass and 3 with a backward pass, which costs twice that (Kaplan et al. 2020). What
        is recomputed is not counted again: these are the operations of the model, not of the hardware (as MFU is
        defined: Chowdhery et al. 2022, appendix B).
        """
        self.tokens[name] += packed.computed_tokens
        self.operations[name] += passes * self._flops.packed(
            tokens=packed.computed_tokens, pairs=packed.computed_pairs, logits=logits
        )

    def performance(self, device: Device, *, bf16: bool) -> dict[str, float]:
        """Over all ranks, which all must call this, and the same on all of them.

        ``<phase>_tok_per_s``: tokens of all ranks per second of the slowest; ``<phase>_tflops``: operations per second
        and rank in units of 10¹²; ``<phase>_mfu``: the same as a part of the device's peak, where that is known and the
        model computes in bfloat16; ``peak_memory_bytes`` of the rank that took most (see :func:`peak_memory`).
        """
        names = sorted(self.seconds)
        counts = [[self.tokens[name], self.operations[name]] for name in names]
        sums_P2 = torch.tensor(counts, dtype=torch.float64, device=device.torch_device).reshape(-1, 2)
        most = torch.tensor([*(self.seconds[name] for name in names), peak_memory(device)], dtype=torch.float64)
        most = most.to(device.torch_device)
        dist.all_reduce(sums_P2, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        *seconds, memory = most.tolist()
        peak = None if device.is_cpu or not bf16 else peak_tflops(torch.cuda.get_device_name())
        found = {"peak_memory_bytes": memory}
        for name, (tokens, operations), elapsed in zip(names, sums_P2.tolist(), seconds, strict=True):
            if tokens:
                found[f"{name}_tok_per_s"] = tokens / elapsed
                found[f"{name}_tflops"] = rate = operations / dist.get_world_size() / elapsed / 1e12
                if peak is not None:
                    found[f"{name}_mfu"] = rate / peak
        return found


def peak_tflops(device_name: str) -> float | None:
    """The peak of a device in :data:`PEAK_TFLOPS`; ``None`` if it is not there."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def reset_peak_memory(device: Device) -> None:
    """Count the peak from now on; on a CPU it is that of the process's whole life."""
    if not device.is_cpu:
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: Device) -> int:
    """Bytes: on CUDA the most that tensors took since the reset (not run), on a CPU the largest resident set."""
    if device.is_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.cuda.max_memory_allocated())
