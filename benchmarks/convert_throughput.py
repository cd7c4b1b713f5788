"""Speed of a conversion to torch_dist and back against `cp -r` of the same bytes, in turns.

A model of 3 GB of random bytes with the widths of Llama-2-7B. Importing is left out: `import_cost` has it. Before each
run the input is either in the page cache, read just before, or dropped from it. In the first case a run ends when the
bytes are in the page cache, as `cp` leaves them; in the second when they are on the disk (fsync), on both sides. The
outputs are deleted after each run, and the deletion is synced. `of cp` is the median, over the rounds, of cp's time
over the conversion's; `of cp, CPU` the same of seconds of CPU, which other work on the machine disturbs less.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from _conversions import Widths, layers_in, measure, write_model
from _records import Record

GB = 1e9
GOAL = 0.7
LLAMA_7B = Widths(hidden=4096, ffn=11008, heads=32, groups=32, vocab=32_000)
CACHED, ON_DISK = "page cache", "disk"


@dataclass(frozen=True)
class Taken:
    """Seconds of one run: wall-clock, and of CPU without the final syncing."""

    wall: float
    cpu: float


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both ways.

    Args:
        out: Where the model and its conversions go.
        quick: One round of 1 GB instead of five of 3 GB.
    """
    hf, torch_dist, output, log = (out / name for name in ("hf", "torch_dist", "output", "log.txt"))
    size = write_model(hf, LLAMA_7B, layers_in(LLAMA_7B, GB if quick else 3 * GB), sparse=False)

    def convert(*words: str | Path) -> Taken:
        run = measure("_convert.py", *words, log=log)
        return Taken(run.seconds, run.cpu)

    records = []
    try:
        convert("hf-to-torch-dist", hf, torch_dist)
        ways = (
            ("to torch_dist", hf, lambda: convert("hf-to-torch-dist", hf, output)),
            ("to Hugging Face", torch_dist, lambda: convert("torch-dist-to-hf", torch_dist, output, hf)),
        )
        for medium in (CACHED, ON_DISK):
            for way, source, side in ways:
                case = f"{way}, {medium}"
                rounds = [against_cp(case, source, output, side, medium) for _ in range(1 if quick else 5)]
                records += figures(case, size, rounds)
    finally:
        for directory in (hf, torch_dist, output):
            shutil.rmtree(directory, ignore_errors=True)
    return records


def figures(case: str, size: int, rounds: list[tuple[Taken, Taken]]) -> list[Record]:
    """Rates and ratios of some rounds of ours and of cp."""
    ours, cp = zip(*rounds, strict=True)
    return [
        Record(case, "rate", size / GB / median(taken.wall for taken in ours), "GB/s", more_is_better=True),
        Record(case, "rate of cp", size / GB / median(taken.wall for taken in cp), "GB/s"),
        Record(case, "of cp", median(b.wall / a.wall for a, b in rounds), "x", more_is_better=True, goal=GOAL),
        Record(case, "of cp, CPU", median(b.cpu / a.cpu for a, b in rounds), "x", more_is_better=True),
    ]


def against_cp(case: str, source: Path, output: Path, convert: Callable[[], Taken], medium: str) -> tuple[Taken, Taken]:
    """One conversion and one copying of its input, one after the other."""
    sides = []
    for side in (convert, lambda: copy(source, output)):
        prepare(source, cached=medium == CACHED)
        taken = side()
        sides.append(Taken(taken.wall + sync(output), taken.cpu) if medium == ON_DISK else taken)
        shutil.rmtree(output)
        os.sync()
    ours, cp = sides
    print(f"{case}: {ours.wall:.2f} s ({ours.cpu:.2f} s CPU), cp {cp.wall:.2f} s ({cp.cpu:.2f} s CPU)", flush=True)
    return ours, cp


def copy(source: Path, output: Path) -> Taken:
    """`cp -r` of the bytes themselves: no holes, no shared blocks."""
    start, start_cpu = time.perf_counter(), _children_cpu()
    subprocess.run(["cp", "-r", "--sparse=never", "--reflink=never", str(source), str(output)], check=True)
    return Taken(time.perf_counter() - start, _children_cpu() - start_cpu)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def prepare(source: Path, *, cached: bool) -> None:
    """Bring the files into the page cache, or out of it."""
    for path in files(source):
        with path.open("rb", buffering=0) as file:
            if cached:
                buffer = bytearray(2**24)
                while file.readinto(buffer):
                    pass
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync(output: Path) -> float:
    """Seconds until all files of a directory are on the disk."""
    start = time.perf_counter()
    for path in files(output):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def files(directory: Path) -> list[Path]:
    """All files in and below a directory."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]
