"""The quick start's train step against an earlier commit's, transformers' and bare Megatron-core's, steps in turn.

SmolLM2-135M's shape with random weights, bf16, all cores: 128 samples of 16 prompts, one micro-batch, with the pass of
a reference model. All sides start from the same weights and take the same loss and AdamW with fp32 weights;
transformers computes every sample whole, and so does `trainer, unshared`: 5,760 tokens. The others compute a shared
prompt once: 1,280 tokens. Each side is a process; two take steps in turn, and the median of each counts. CPU seconds
are the process's, which other work on the machine disturbs less than clock time.

`products` is the part of the step's operations, by time, that are matrix products. `rate` is what the layers' matrices
reach alone, forward and backward; `rate in the step` what all products of the step come to, over the whole step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from _quickstart_step import GROUP_SIZE, GROUPS, PROMPT, RESPONSE, SHAPE
from _records import Record

from slime_convert import hf_to_torch_dist

ROOT = Path(__file__).resolve().parents[1]
EARLIER = "d07c591"
"""The trainer before pipelines, experts and context parallelism; left out where git does not have the commit."""
UNSHARED = "trainer, unshared"
GOALS = {
    ("trainer", EARLIER): 0.85,
    ("trainer", "bare core"): 1.05,
    ("trainer", "transformers"): 1.0,
    ("trainer", UNSHARED): 1.0,
    (UNSHARED, "transformers"): 1.0,  # as many tokens on both sides
}
"""Of the clock time of the first over that of the second. All sides at once would not fit into 24 GB."""
QUICK = (("trainer", "bare core"), ("trainer", "transformers"))
TOKENS, TARGETS = GROUPS * (PROMPT + GROUP_SIZE * (RESPONSE - 1)), GROUPS * GROUP_SIZE * RESPONSE

Numbers = dict[str, float]


def main(out: Path, *, quick: bool) -> list[Record]:
    """Run all pairs of sides.

    Args:
        out: For the model, and the earlier commit's tree.
        quick: Two layers, two rounds and two pairs instead of 30, five and all.
    """
    layers, rounds = (2, 2) if quick else (SHAPE.num_layers, 5)
    threads = len(os.sched_getaffinity(0))
    write_model(out, layers)
    found = trees(out)
    records: dict[tuple[str, str], Record] = {}
    norms: Numbers = {}
    for pair, goal in GOALS.items():
        if quick and pair not in QUICK:
            continue
        if not found.keys() >= set(pair):
            continue
        sides = {name: Side(name, found[name], out, threads) for name in pair}
        medians = steps_in_turn(sides, rounds)
        for name, side in sides.items():
            norms.setdefault(name, side.first["grad_norm"])
            for record in figures(name, medians[name], side.ask("profile")["products"], norms):
                records.setdefault((record.case, record.metric), record)
            side.close()
        one, other = (medians[name] for name in pair)
        for metric, bound in (("time", goal), ("CPU time", None)):
            record = Record(" / ".join(pair), metric, one[metric] / other[metric], "x", False, bound)
            records[record.case, metric] = record
    remove_tree(out)
    alone = rate_of_products(threads, layers)
    within = products_flops(layers) / records["trainer", "time"].value
    return [
        *records.values(),
        Record("matrix products", "rate", alone / 1e9, "GFLOP/s", True),
        Record("matrix products", "rate in the step", within / 1e9, "GFLOP/s", True),
    ]


def steps_in_turn(sides: Mapping[str, Side], rounds: int) -> dict[str, Numbers]:
    """Each side's median seconds of a step."""
    times: dict[str, dict[str, list[float]]] = {name: {"time": [], "CPU time": []} for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            taken = side.ask("step")
            print(f"round {number}: {name}: {taken['time']:.2f} s, CPU {taken['CPU time']:.2f} s", flush=True)
            for metric, seconds in taken.items():
                times[name][metric].append(seconds)
    return {name: {metric: statistics.median(row) for metric, row in found.items()} for name, found in times.items()}


def figures(name: str, medians: Numbers, products: float, norms: Numbers) -> list[Record]:
    """A side's numbers; its gradient's norm against the trainer's."""
    difference = abs(norms[name] / norms["trainer"] - 1)
    return [
        *(Record(name, metric, seconds, "s", False) for metric, seconds in medians.items()),
        Record(name, "products", products, "of the step", True, 0.55 if name == "trainer" else None),
        Record(name, "difference of the gradient norm", difference, "relative", False, 0.02),
    ]


class Side:
    """A process that takes steps."""

    def __init__(self, name: str, tree: Path, directory: Path, threads: int) -> None:
        packages = ("core", "rollout", "megatron", "convert", "launch")
        path = [str(tree / "packages" / f"slime-{package}" / "src") for package in packages]
        program = Path(__file__).with_name("_train_step_side.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), name, str(directory), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        self.first = self._answer()

    def ask(self, what: str) -> dict[str, float]:
        """Have it do that; the numbers."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # others are libraries'
                numbers: dict[str, float] = json.loads(line)
                return numbers
        raise RuntimeError(f"a side ended: {self._process.wait()}")


def trees(out: Path) -> dict[str, Path]:
    """Which sources each side takes."""
    found = dict.fromkeys(("trainer", UNSHARED, "bare core", "transformers"), ROOT)
    added = subprocess.run(
        ["git", "worktree", "add", "--force", "--detach", str(out / "earlier"), EARLIER], cwd=ROOT, capture_output=True
    )
    return found | ({EARLIER: out / "earlier"} if added.returncode == 0 else {})


def remove_tree(out: Path) -> None:
    """Forget the earlier commit's."""
    subprocess.run(["git", "worktree", "remove", "--force", str(out / "earlier")], cwd=ROOT, capture_output=True)


def write_model(out: Path, layers: int) -> None:
    """Random weights, for transformers in `hf` and for Megatron in `torch_dist`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.ffn_hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=SHAPE.num_attention_heads,
        num_key_value_heads=SHAPE.num_query_groups,
        max_position_embeddings=SHAPE.max_position_embeddings,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(out / "hf")
    hf_to_torch_dist(out / "hf", out / "torch_dist")


def layer_matrices() -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's matrices."""
    hidden, heads = SHAPE.hidden_size, SHAPE.num_attention_heads + 2 * SHAPE.num_query_groups
    channels = SHAPE.kv_channels
    return [
        (hidden, heads * channels),
        (SHAPE.num_attention_heads * channels, hidden),
        (hidden, 2 * SHAPE.ffn_hidden_size),
        (SHAPE.ffn_hidden_size, hidden),
    ]


def products_flops(layers: int) -> float:
    """Operations of a step's products with weights: two forward passes and a backward one, which makes logits again."""
    in_layers = layers * sum(2.0 * TOKENS * rows * columns for rows, columns in layer_matrices())
    return 4 * in_layers + 5 * 2.0 * TARGETS * SHAPE.hidden_size * SHAPE.vocab_size


def rate_of_products(threads: int, layers: int) -> float:
    """Operations per second of the layers' products alone: two forward passes and both gradients."""
    torch.set_num_threads(threads)
    seconds = operations = 0.0
    for inputs, outputs in layer_matrices():
        input_TI, weight_OI, grad_TO = (
            torch.randn(*size).bfloat16() for size in ((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs))
        )
        products = [(input_TI, weight_OI.t())] * 2 + [(grad_TO, weight_OI), (grad_TO.t(), input_TI)]
        for left, right in products:
            taken = []
            for _ in range(9):
                start = time.perf_counter()
                torch.mm(left, right)
                taken.append(time.perf_counter() - start)
            seconds += statistics.median(taken)
            operations += 2.0 * TOKENS * inputs * outputs
    return operations / seconds
