"""Speed of a conversion to torch_dist and back against `cp -r` of the same files, in turns.

A model of 2 GB of random bytes with the widths of Llama-2-7B; with `--full` one of 20 GB, too. Each side is measured
from the start of its process until its output is on the disk: `sync` comes after both, though `slime-convert` flushes
what it writes itself. Before each run the input is dropped from the page cache, and some memory is used and freed: a
virtual machine takes several times as long for memory that it gave back to its host, and that of the run before would
be there for one side only. The outputs are deleted after each run, so the disk holds a model twice at most. `of cp` is
the median, over the rounds, of cp's time over the conversion's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from _conversions import Widths, layers_in, write_model
from _records import Record

GB = 1e9
GOAL = 0.7
LLAMA_7B = Widths(hidden=4096, ffn=11008, heads=32, groups=32, vocab=32_000)
SPARE_BYTES = 2 * GB
WARM = 3
"""Times a conversion's input: memory that is used and freed before it."""
# The bytes themselves: no holes, no shared blocks.
CP = ("cp", "-r", "--sparse=never", "--reflink=never")

Command = list[str | Path]


def main(out: Path, *, quick: bool, full: bool = False) -> list[Record]:
    """Measure both ways.

    Args:
        out: Where a model and its conversions go.
        quick: One round of 1 GB.
        full: Two rounds of 20 GB after the five of 2 GB; they need 42 GB of disk.
    """
    rounds_by_size = {1: 1} if quick else {2: 5, 20: 2} if full else {2: 5}
    if shutil.disk_usage(out).free < 2 * max(rounds_by_size) * GB + SPARE_BYTES:
        raise RuntimeError(f"{out} has too little room for a model of {max(rounds_by_size)} GB twice")
    return [record for size, rounds in rounds_by_size.items() for record in of_size(out, size, rounds)]


def of_size(out: Path, size: int, rounds: int) -> list[Record]:
    """Both ways with a model of that many GB; nothing is left behind."""
    hf, origin, torch_dist, output = (out / name for name in ("hf", "origin", "torch_dist", "output"))
    program = Path(sys.executable).with_name("slime-convert")
    there: Command = [program, "hf-to-torch-dist", "--quiet", "--hf-checkpoint", hf, "--save"]
    back: Command = [program, "torch-dist-to-hf", "--quiet", "--input-dir", torch_dist]
    back += ["--origin-hf-dir", origin, "--output-dir"]
    try:
        nbytes = write_model(hf, LLAMA_7B, layers_in(LLAMA_7B, size * GB), sparse=False)
        origin.mkdir()
        shutil.copy(hf / "config.json", origin)
        records = against_cp(f"{size} GB to torch_dist", nbytes, hf, output, there, rounds)
        seconds([*there, torch_dist], hf)
        shutil.rmtree(hf)
        return records + against_cp(f"{size} GB to Hugging Face", nbytes, torch_dist, output, back, rounds)
    finally:
        for directory in (hf, origin, torch_dist, output):
            shutil.rmtree(directory, ignore_errors=True)


def against_cp(case: str, nbytes: int, source: Path, output: Path, convert: Command, rounds: int) -> list[Record]:
    """A conversion and copying its input, in turns; which comes first changes from round to round.

    Args:
        case: Name of the case.
        nbytes: Bytes of the weights.
        source: The input.
        output: Where both write to.
        convert: The conversion's words but for the last, which is ``output``.
        rounds: How often.
    """
    commands: dict[str, Command] = {"slime-convert": convert, "cp": [*CP, source]}
    taken: dict[str, list[float]] = {side: [] for side in commands}
    for number in range(rounds):
        for side in list(commands)[:: -1 if number % 2 else 1]:
            taken[side].append(seconds([*commands[side], output], source))
            shutil.rmtree(output)
            os.sync()
            print(f"{case}, round {number}: {side}: {taken[side][-1]:.2f} s", flush=True)
    ours, cp = taken.values()
    ratios = [b / a for a, b in zip(ours, cp, strict=True)]
    return [
        Record(case, "rate", nbytes / GB / median(ours), "GB/s", more_is_better=True),
        Record(case, "rate of cp", nbytes / GB / median(cp), "GB/s"),
        Record(case, "of cp", median(ratios), "x", more_is_better=True, goal=GOAL),
    ]


def seconds(command: Command, source: Path) -> float:
    """From the start of a process until what it wrote is on the disk; its input is read from the disk."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    warm = b"1" * min(WARM * sum(path.stat().st_size for path in files), memory // 4)
    del warm
    start = time.perf_counter()
    subprocess.run(command, check=True)
    os.sync()
    return time.perf_counter() - start
