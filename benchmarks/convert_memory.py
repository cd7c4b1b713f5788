"""Peak memory of a 20 GB model's conversion to torch_dist and back.

The model has Llama-70B's widths and fewer layers; with less room on the disk it has fewer still. Its files are holes,
and holes are punched into the checkpoint that comes of them, so that 20 GB of room suffice for both ways; what is
written is written in full. `peak` is the largest resident size of the whole process, with the interpreter and all that
it imports; `anonymous` and `mapped` are how far its parts grew after importing (pages of mapped files are taken back by
the system when it needs them). The goal is a peak of at most 0.5 GB above the largest weight, which is the embedding.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from _conversions import Run, Widths, layers_in, measure, nbytes, write_model
from _records import Record

GB = 1e9
GOAL = 0.5
LLAMA_70B = Widths(hidden=8192, ffn=28672, heads=64, groups=8, vocab=128_256)
LLAMA_1B = Widths(hidden=2048, ffn=8192, heads=16, groups=4, vocab=128_256)
SPARE_BYTES = 4 * GB


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both ways, and leave nothing behind.

    Args:
        out: Where the model and its conversions go.
        quick: 3 GB with the widths of a model of 1.2 B parameters.
    """
    widths, size = (LLAMA_1B, 3 * GB) if quick else (LLAMA_70B, 20 * GB)
    layers = layers_in(widths, min(size, shutil.disk_usage(out).free - SPARE_BYTES))
    hf, torch_dist, back = (out / name for name in ("hf", "torch_dist", "back"))
    total = write_model(hf, widths, layers, sparse=True)
    largest = nbytes({"embedding": widths.ends()["model.embed_tokens.weight"]})
    print(f"{layers} layers, {total / GB:.1f} GB, largest tensor {largest / GB:.2f} GB", flush=True)
    try:
        there = measure("_convert.py", "hf-to-torch-dist", hf, torch_dist, log=out / "log.txt")
        for path in torch_dist.rglob("*.distcp"):
            subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)
        again = measure("_convert.py", "torch-dist-to-hf", torch_dist, back, hf, log=out / "log.txt")
    finally:
        for directory in (hf, torch_dist, back):
            shutil.rmtree(directory, ignore_errors=True)
    sizes = [Record("model", "size", total / GB, "GB"), Record("model", "largest tensor", largest / GB, "GB")]
    return sizes + records("to torch_dist", there, largest) + records("to Hugging Face", again, largest)


def records(case: str, run: Run, largest: int) -> list[Record]:
    """The figures of one way."""
    peak = run.imported + run.peak
    return [
        Record(case, "peak", peak / GB, "GB", more_is_better=False),
        Record(case, "anonymous", run.anonymous / GB, "GB", more_is_better=False),
        Record(case, "mapped", run.mapped / GB, "GB", more_is_better=False),
        Record(case, "peak above largest", (peak - largest) / GB, "GB", more_is_better=False, goal=GOAL),
    ]
