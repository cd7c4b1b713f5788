"""How long a save stops a run, against saves as they were, and how long a run takes to be back from a checkpoint.

The goals: at most 0.2 of a save with torch's own writer, which every run waited for; at most the imports and reading
the checkpoint at 70 % of `cp`'s rate. One rank, AdamW's state in fp32 beside bf16 weights.

The saves are of the quick start's model, and the three ways take turns in one process, each after a train step:
`before` as slime wrote until now, `waited for` as with --no-async-save, `in the background` as by default. `stopped` is
what the run waits for. With `step at once`, where nothing is generated between a save and the next train step, it has
the copy of what is not written when the optimizer changes it. `step` is a train step, alone and during a write.

`ready` is when a rank of a new process has loaded its state, and `first step` when it has trained on a batch of 512
tokens, too. Above what the goal allows, the step that any run takes first is part of it: `step` is what a second one
takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from _records import Record

if TYPE_CHECKING:
    from slime_core.types import TrainShard
    from slime_megatron.worker import MegatronWorker

SAVE_GOAL = 0.2
CP_SHARE = 0.7


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure in fresh processes.

    Args:
        out: For the checkpoints.
        quick: Smaller models, and one round instead of five.
    """
    size, rounds = (256, 1) if quick else (512, 5)
    saves = saved_records(in_new_process("saves", str(out / "saves"), "256" if quick else "576", str(rounds)))
    shutil.rmtree(out / "saves")
    in_new_process("save", str(out), str(size), "1")
    [newest] = out.glob("iter_0000001")
    nbytes = sum(path.stat().st_size for path in newest.iterdir())
    copying = min(seconds_of_cp(newest, out / "copy") for _ in range(rounds))
    resumed = [in_new_process("resume", str(out), str(size), "1") for _ in range(rounds)]
    least = {name: min(run[name] for run in resumed) for name in resumed[0]}
    allowed = least["imports"] + copying / CP_SHARE
    return [
        *saves,
        Record("resume", "size", nbytes / 2**20, "MiB"),
        Record("cp", "copy", copying, "s", False),
        *(Record("resume", name, least[name], "s", False) for name in ("imports", "ready", "step")),
        Record("resume", "first step", least["first step"], "s", False, allowed + least["step"]),
    ]


def saved_records(found: dict[str, float]) -> list[Record]:
    """Seconds of each way, each the median of its rounds, and what they are of those before."""
    before = found["before"]
    return [
        Record("saves", "size", found["size"], "MiB"),
        Record("save before", "stopped", before, "s", False),
        Record("save waited for", "stopped", found["waited"], "s", False),
        Record("save waited for", "of before", found["waited"] / before, "ratio", False, SAVE_GOAL),
        Record("save in the background", "stopped", found["call"], "s", False),
        Record("save in the background", "of before", found["call"] / before, "ratio", False, SAVE_GOAL),
        Record("save in the background", "whole", found["whole"], "s", False),
        Record("save in the background, step at once", "stopped", found["call and copy"], "s", False),
        Record("save in the background, step at once", "of before", found["call and copy"] / before, "ratio", False),
        Record("step", "alone", found["step"], "s", False),
        Record("step", "during a write", found["step beside"], "s", False),
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


def worker(out: str, size: int, resume_from: str | None, *, quick_start: bool = False) -> MegatronWorker:
    """One rank with a model of 8 layers and ``size`` hidden channels, or with the quick start's shape."""
    from _quickstart_step import SHAPE as QUICK_START

    from slime_convert.published import PUBLISHED
    from slime_convert.shape import ModelShape
    from slime_core.config import AlgorithmConfig
    from slime_core.types import Rendezvous
    from slime_megatron.service import MegatronConfig, start_worker

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
    if quick_start:
        shape = dataclasses.replace(QUICK_START, num_layers=30 if size == QUICK_START.hidden_size else 8)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = MegatronConfig(save=out, async_save=True, bf16=True)
    rendezvous = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=port)
    return start_worker(config, AlgorithmConfig(), shape, rendezvous, resume_from=resume_from)


def save(out: str, size: int) -> dict[str, float]:
    """Write one checkpoint."""
    rank = worker(out, size, None)
    rank.save(1)
    rank.saved(wait=True)
    rank.close()
    return {}


def saves(out: str, size: int, rounds: int) -> dict[str, float]:
    """Save each way in turns; the median seconds of each."""
    rank = worker(out, size, None, quick_start=True)
    background, found = rank._roles._background, defaultdict[str, list[float]](list)
    assert background is not None
    release = background.release

    def timed_release() -> None:
        with timed(found["copy"]):
            release()

    background.release = timed_release  # type: ignore[method-assign]
    number = 0
    for _ in range(rounds + 1):  # the first warms all of them up
        for way in ("before", "waited", "call", "step at once"):
            number += 1
            with timed(found["step"]):
                rank.train(batch())
            shutil.rmtree(Path(out), ignore_errors=True)
            Path(out).mkdir()
            rank._roles._background = background if way in ("call", "step at once") else None
            os.sync()  # what was removed or written before is not a part of it
            with torch_writer() if way == "before" else contextlib.nullcontext(), timed(found[way]):
                rank.save(number)
            rank._roles._background = background
            if way == "step at once":
                found["copy"].clear()
                with timed(found["step beside"]):
                    rank.train(batch())
                found["call and copy"].append(found[way][-1] + sum(found["copy"]))
            elif way == "call":
                with timed(found["whole"]):
                    rank.saved(wait=True)
                found["whole"][-1] += found["call"][-1]
            rank.saved(wait=True)
    nbytes = sum(path.stat().st_size for path in Path(out).glob("*/*"))
    rank.close()
    medians = {name: statistics.median(values[1:]) for name, values in found.items() if name != "copy"}
    return medians | {"size": nbytes / 2**20}


@contextlib.contextmanager
def timed(found: list[float]) -> Iterator[None]:
    """Add the seconds of the block."""
    start = time.perf_counter()
    yield
    found.append(time.perf_counter() - start)


@contextlib.contextmanager
def torch_writer() -> Iterator[None]:
    """Within the block, checkpoints are written as before: by torch's own writer."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from slime_megatron.checkpoints import writer as checkpoint_writer

    def writer(directory: str, reading: object) -> FileSystemWriter:
        return FileSystemWriter(directory)

    with mock.patch.object(checkpoint_writer, "DirectWriter", writer):
        yield


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
    from slime_megatron.ranks.device import select_device

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
    numbers: Any
    if what == "saves":
        numbers = saves(directory, int(channels), int(count))
    else:
        numbers = {"save": save, "resume": resume}[what](directory, int(channels))
    print(json.dumps(numbers))
