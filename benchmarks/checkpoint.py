"""How long a checkpoint written in the background stops training, and how long a run takes to be back from one.

The goals: at most 1.2 times copying the state; at most the imports and reading the checkpoint at 70 % of `cp`'s rate.
One rank, a model of 8 layers with random weights, AdamW's state in fp32 beside bf16 weights.

`ready` is when a rank of a new process has loaded its state, and `first step` when it has trained on a batch of 512
tokens, too. Above what the goal allows, the step that any run takes first is part of it: `step` is what a second one
takes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _records import Record

if TYPE_CHECKING:
    from slime_core.types import TrainShard
    from slime_megatron.worker import MegatronWorker

COPY_GOAL = 1.2
CP_SHARE = 0.7


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure in fresh processes.

    Args:
        out: For the checkpoints.
        quick: A smaller model, and two rounds instead of five.
    """
    size, rounds = (256, 2) if quick else (512, 5)
    saved = in_new_process("save", str(out), str(size), str(rounds))
    [newest] = out.glob(f"iter_{rounds:07d}")
    nbytes = sum(path.stat().st_size for path in newest.iterdir())
    copying = min(seconds_of_cp(newest, out / "copy") for _ in range(rounds))
    resumed = [in_new_process("resume", str(out), str(size), "1") for _ in range(rounds)]
    least = {name: min(run[name] for run in resumed) for name in resumed[0]}
    allowed = least["imports"] + copying / CP_SHARE
    return [
        Record("state", "size", nbytes / 2**20, "MiB"),
        Record("copying the state", "copy", saved["copy"], "s", False),
        Record("save", "blocking", saved["blocking"], "s", False, COPY_GOAL * saved["copy"]),
        Record("save", "whole", saved["whole"], "s", False),
        Record("cp", "copy", copying, "s", False),
        *(Record("resume", name, least[name], "s", False) for name in ("imports", "ready", "step")),
        Record("resume", "first step", least["first step"], "s", False, allowed + least["step"]),
    ]


def in_new_process(*words: str) -> dict[str, float]:
    """Call this file; the numbers that it prints."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def seconds_of_cp(source: Path, target: Path) -> float:
    """What copying a directory takes while the system holds it in memory."""
    shutil.rmtree(target, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    return time.perf_counter() - start


def worker(out: str, size: int, resume_from: str | None) -> MegatronWorker:
    """One rank with a model of ``size`` hidden channels."""
    from slime_convert.published import PUBLISHED
    from slime_convert.shape import ModelShape
    from slime_core.config import AlgorithmConfig
    from slime_core.types import Rendezvous
    from slime_megatron.config import MegatronConfig
    from slime_megatron.start import start_worker

    shape = dataclasses.replace(
        ModelShape.from_hf_config(PUBLISHED["qwen3-0.6B"].config),
        num_layers=8,
        hidden_size=size,
        ffn_hidden_size=3 * size,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=size // 8,
        vocab_size=32_000,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = MegatronConfig(save=out, async_save=True, bf16=True)
    rendezvous = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=port)
    return start_worker(config, AlgorithmConfig(), shape, rendezvous, resume_from=resume_from)


def save(out: str, size: int, rounds: int) -> dict[str, float]:
    """Copy the state and save it in turns; the least seconds of each."""
    rank = worker(out, size, None)
    found: dict[str, list[float]] = {"copy": [], "blocking": [], "whole": []}
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        copies = [tensor.detach().clone() for tensor in rank.device_tensors()]
        found["copy"].append(time.perf_counter() - start)
        del copies
        start = time.perf_counter()
        rank.save(number)
        found["blocking"].append(time.perf_counter() - start)
        rank.saved(wait=True)
        found["whole"].append(time.perf_counter() - start)
    rank.close()
    return {name: min(values) for name, values in found.items()}


def batch() -> TrainShard:
    """Eight samples of 64 tokens, half of them trained."""
    import numpy as np

    from slime_core.types import TrainSample, TrainShard, TrainStep

    samples = [
        TrainSample(
            index=index,
            group_index=index // 4,
            tokens=np.arange(64, dtype=np.int32) + 64 * index,
            response_length=32,
            loss_mask=np.ones(32, np.uint8),
            trajectory_tokens=32,
            reward=index % 4 - 1.5,
            raw_reward=float(index % 4),
        )
        for index in range(8)
    ]
    step = TrainStep(micro_batches=[list(range(8))], global_trajectories=8, global_tokens=8 * 32)
    return TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])


def resume(out: str, size: int) -> dict[str, float]:
    """Seconds of the imports alone, of all until the rank could train, of all until it had, and of another step."""
    start = time.perf_counter()
    from slime_megatron.device import select_device

    select_device()
    import slime_megatron.worker  # noqa: F401

    imports = time.perf_counter() - start
    rank = worker(out, size, out)
    ready = time.perf_counter() - start
    rank.train(batch())
    first = time.perf_counter() - start
    rank.train(batch())
    step = time.perf_counter() - start - first
    rank.close()
    return {"imports": imports, "ready": ready, "first step": first, "step": step}


if __name__ == "__main__":
    what, directory, channels, count = sys.argv[1:]
    numbers: Any = save(directory, int(channels), int(count)) if what == "save" else resume(directory, int(channels))
    print(json.dumps(numbers))
