"""CPU seconds and peak memory of a call, and rounds in which sides alternate."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Side = Callable[[], object]


def rounds_of(sides: Mapping[str, Side], clear: Callable[[], None], rounds: int) -> dict[str, dict[str, float]]:
    """Run all sides in turn, several times.

    Args:
        sides: What to run.
        clear: Called before each, outside the measurement; drops the gradients of the side before.
        rounds: How often.

    Returns:
        By side: `seconds`, the least of all rounds, and `extra`, the largest number of bytes.
    """
    result: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for name, side in sides.items():
            clear()
            seconds, extra = measure(side)
            print(f"round {number}: {name}: {seconds:.2f} s, {extra / 2**20:.0f} MiB", flush=True)
            before = result.setdefault(name, {"seconds": seconds, "extra": extra})
            result[name] = {"seconds": min(before["seconds"], seconds), "extra": max(before["extra"], extra)}
    return result


def measure(call: Side) -> tuple[float, float]:
    """CPU seconds of this process, and by how many bytes its resident size grew at most."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free must not hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (proc(5))
    before = _status("VmRSS")
    start = time.process_time()
    call()
    return time.process_time() - start, _status("VmHWM") - before


def _status(field: str) -> float:
    """A number of bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(field))
