"""Hugging Face → torch_dist → Hugging Face against mbridge's load and save: seconds and peak memory.

A tiny Qwen3 and SmolLM2-135M, in fp32, on a CPU, in one process; each run in a process of its own, sides in turn.
mbridge builds a Megatron model, loads the weights into it and saves them from there: one directory is written. Ours
writes two, with a checkpoint that Megatron loads in between, and builds no model. Importing is not counted on either
side (mbridge cannot be imported without megatron-core and transformers, ours needs neither). Input and output stay in
the page cache. Times are medians, sizes the largest of the rounds; both sides' outputs must equal the input.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
from _conversions import Run, measure
from _quick_start import prepare
from _records import Record
from quickstart import ROOT
from safetensors.torch import load_file

REQUIREMENTS = ROOT / "benchmarks" / "requirements-mbridge.txt"
MBRIDGE = ROOT / ".venv-mbridge"


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both sides on both models.

    Args:
        out: Directory for the models and what is made of them.
        quick: One round instead of five.
    """
    install_mbridge()
    places = prepare()
    write_tiny(out / "tiny")
    rounds = 1 if quick else 5
    return [
        record
        for case, model in (("tiny", out / "tiny"), ("135M", places.hf))
        for record in compare(case, model, out, rounds)
    ]


def compare(case: str, model: Path, out: Path, rounds: int) -> list[Record]:
    """Both sides in turn on one model."""
    runs: dict[str, list[Run]] = {"ours": [], "mbridge": []}
    for number in range(rounds):
        for side, done in runs.items():
            output, log = out / "output", out / "log.txt"
            if side == "ours":
                done.append(measure("_convert.py", "there-and-back", model, out / "torch_dist", output, log=log))
                shutil.rmtree(out / "torch_dist")
            else:
                done.append(measure("_convert_mbridge.py", MBRIDGE, model, output, log=log))
            check_same(model, output)
            shutil.rmtree(output)
            print(f"{case}, round {number}: {side}: {done[-1].seconds:.2f} s, {done[-1].peak / 1e6:.0f} MB", flush=True)
    records, figures = [], {}
    for side, done in runs.items():
        seconds, cpu = median(run.seconds for run in done), median(run.cpu for run in done)
        peak, anonymous = (max(getattr(run, part) for run in done) / 1e6 for part in ("peak", "anonymous"))
        figures[side] = {"time": seconds, "CPU": cpu, "peak": peak, "anonymous": anonymous}
        units = {"time": "s", "CPU": "s", "peak": "MB", "anonymous": "MB"}
        records += [Record(f"{case}: {side}", name, figures[side][name], units[name], False) for name in units]
    return records + [
        Record(f"{case}: ours / mbridge", name, ours / figures["mbridge"][name], "x", more_is_better=False)
        for name, ours in figures["ours"].items()
    ]


def check_same(before: Path, after: Path) -> None:
    """Both directories must hold the same weights."""
    expected, got = (load_file(directory / "model.safetensors") for directory in (before, after))
    wrong = [name for name in expected if name not in got or not torch.equal(expected[name], got[name])]
    if wrong:
        raise RuntimeError(f"{after} differs from {before} in {len(wrong)} weights, such as {wrong[0]}")


def write_tiny(directory: Path) -> None:
    """A random Qwen3 of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **sizes, **heads, tie_word_embeddings=False)).save_pretrained(
        directory
    )


def install_mbridge() -> None:
    """`.venv-mbridge`, a directory with the package's files, unless it is there."""
    stamp = MBRIDGE / "installed.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    print("directory .venv-mbridge: mbridge", flush=True)
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(MBRIDGE)]
    subprocess.run([*install, "--requirement", str(REQUIREMENTS)], check=True, cwd=ROOT)
    stamp.write_text(REQUIREMENTS.read_text())
