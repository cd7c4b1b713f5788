"""What `slime-convert inspect` takes from start to end: seconds of a fresh process, the least of several.

The goal is less than 1 s. Headers of sparse files stand for real checkpoints: nothing but headers is read. Importing
torch, which `inspect` does without, is measured beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from _records import Record

from slime_convert.torch_dist import WeightSource, write_release

GOAL = 1.0
LAYERS = 61
EXPERTS = 256
HIDDEN = 7168
EXPERT_HIDDEN = 2048
KEYS = 10_000


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure every case.

    Args:
        out: Where the checkpoints go: a few MB of headers, and sparse files that hold nothing.
        quick: Two processes per case instead of five.
    """
    repeats = 2 if quick else 5
    small, large = out / "small", out / "large"
    write_hf(small, layers=2, experts=0)
    write_hf(large, layers=LAYERS, experts=EXPERTS)
    write_torch_dist(out / "few keys", 4)
    write_torch_dist(out / "many keys", KEYS)
    cases: dict[str, Path] = {
        "Hugging Face, 4 weights": small,
        f"Hugging Face, {2 * LAYERS + LAYERS * EXPERTS * 3:,} weights": large,
        "torch_dist, 4 keys": out / "few keys",
        f"torch_dist, {KEYS:,} keys": out / "many keys",
    }
    inspect = [sys.executable, "-c", "import sys; from slime_convert.cli import main; sys.exit(main())", "inspect"]
    records = [
        Record(case, "inspect", least_seconds([*inspect, str(path)], repeats), "s", False, GOAL)
        for case, path in cases.items()
    ]
    return [
        *records,
        Record("import torch", "import", least_seconds([sys.executable, "-c", "import torch"], repeats), "s"),
    ]


def least_seconds(command: list[str], repeats: int) -> float:
    """Wall-clock time of a process, the least of several."""
    return min(seconds(command) for _ in range(repeats))


def seconds(command: list[str]) -> float:
    """Wall-clock time of a process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def write_hf(directory: Path, *, layers: int, experts: int) -> None:
    """A directory with one shard per layer, named and shaped as DeepSeek-V3's experts, its bytes absent."""
    directory.mkdir()
    shapes = {
        "gate_proj": [EXPERT_HIDDEN, HIDDEN],
        "up_proj": [EXPERT_HIDDEN, HIDDEN],
        "down_proj": [HIDDEN, EXPERT_HIDDEN],
    }
    index: dict[str, str] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights = {f"{prefix}.input_layernorm.weight": [HIDDEN], f"{prefix}.post_attention_layernorm.weight": [HIDDEN]}
        for expert in range(experts):
            weights |= {f"{prefix}.mlp.experts.{expert}.{name}.weight": shape for name, shape in shapes.items()}
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        write_sparse(directory / file, weights)
        index |= dict.fromkeys(weights, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    (directory / "config.json").write_text('{"model_type": "deepseek_v3"}', encoding="utf-8")


def write_sparse(path: Path, weights: dict[str, list[int]]) -> None:
    """A safetensors file whose tensors take no room on the disk."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape in weights.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


def write_torch_dist(directory: Path, keys: int) -> None:
    """A checkpoint with that many tensors, each of them small and under a key of its own."""
    directory.mkdir()
    tensor = torch.zeros(8, 8, dtype=torch.bfloat16)
    sources = [WeightSource(f"experts.{index}.weight", (8, 8), tensor.dtype, lambda: tensor) for index in range(keys)]
    write_release(directory, sources, {"num_layers": LAYERS})
