"""What short `slime-convert` commands take from start to end: seconds of a fresh process, the least of several.

`--help`, `--version`, and `inspect` of Hugging Face directories and of torch_dist checkpoints. The goal is less than
0.5 s, and of torch_dist, whose metadata are a pickle that is read with care, 1 s. Headers of sparse files stand for
real checkpoints: nothing but headers is read. A command that imports torch fails here; importing it is measured beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _conversions import write_file
from _records import Record

from slime_convert.files.tensors import LazyTensor
from slime_convert.files.writing import in_hand, write_files
from slime_convert.formats.torch_dist_writer import MegatronTensor, new_release

GOAL = 0.5
TORCH_DIST_GOAL = 1.0
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
    small, large, few, many = (out / name for name in ("small", "large", "few keys", "many keys"))
    write_hf(small, layers=2, experts=0)
    write_hf(large, layers=LAYERS, experts=EXPERTS)
    write_torch_dist(few, 4)
    write_torch_dist(many, KEYS)
    (out / "no torch").mkdir()
    (out / "no torch" / "torch.py").write_text("raise RuntimeError('torch is imported')\n", encoding="utf-8")
    without_torch = os.environ | {"PYTHONPATH": str(out / "no torch")}
    program = str(Path(sys.executable).with_name("slime-convert"))
    cases = {
        "--help": ["--help"],
        "--version": ["--version"],
        "inspect, Hugging Face, 4 weights": ["inspect", str(small)],
        f"inspect, Hugging Face, {2 * LAYERS + LAYERS * EXPERTS * 3:,} weights": ["inspect", str(large)],
        "inspect, torch_dist, 4 keys": ["inspect", str(few)],
        f"inspect, torch_dist, {KEYS:,} keys": ["inspect", str(many)],
    }
    records = [
        Record(
            *(case, "time", least_seconds([program, *words], without_torch, repeats), "s"),
            more_is_better=False,
            goal=TORCH_DIST_GOAL if "torch_dist" in case else GOAL,
        )
        for case, words in cases.items()
    ]
    torch = least_seconds([sys.executable, "-c", "import torch"], dict(os.environ), repeats)
    return [*records, Record("import torch", "time", torch, "s")]


def least_seconds(command: list[str], environment: dict[str, str], repeats: int) -> float:
    """Wall-clock time of a process, the least of several."""
    return min(seconds(command, environment) for _ in range(repeats))


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall-clock time of a process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
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
        write_file(directory / file, weights, sparse=True)
        index |= dict.fromkeys(weights, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    (directory / "config.json").write_text('{"model_type": "deepseek_v3"}', encoding="utf-8")


def write_torch_dist(directory: Path, keys: int) -> None:
    """A checkpoint with that many tensors, each of them small and under a key of its own."""
    directory.mkdir()
    names = [f"experts.{number}.weight" for number in range(keys)]
    zeros = LazyTensor.zeros("bfloat16", (8, 8))
    weights = [MegatronTensor(in_hand(name, zeros), stored_as=(name,)) for name in names]
    release = new_release(directory, weights, {"num_layers": LAYERS}, stack_layers=False)
    write_files(release.tensors)
    for name, data in release.others.items():
        (directory / name).write_bytes(data)
