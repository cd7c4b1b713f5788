"""A rollout from its last reward to its first forward: 2,048 samples of 8,192 tokens, through Ray, to one rank.

The rollout worker holds `Sample` objects. It turns them into arrays, checks them, writes them to disk (`write` says how
long that took), splits them, and puts the shard into Ray's object store; the rank fetches it and packs its first
micro-batch. The three processes are on one machine, and call the functions that a run calls. Each sample has
256 prompt tokens, a loss mask, float32 log-probs and weight versions.

`driver` is CPU time of the launcher's process and `worker` of the rollout worker's, `all` is wall time until the rank
has its micro-batch. `memory` is what the worker, with its part of the object store, and then the rank took beyond what
was there at most, over the size of the arrays. Times are the least of four rounds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from _records import Record

from slime_convert.shape import ModelShape
from slime_core.metrics import rollout_metrics
from slime_core.types import RolloutBatch, RolloutColumns, Sample, Status
from slime_core.types.arrays import Ragged
from slime_launch.batch_spec import batch_spec
from slime_launch.config import ClusterConfig
from slime_launch.flags import parse_train
from slime_launch.ray_runtime import ray_runtime
from slime_rollout.prepare import BatchSpec, prepare_rollout
from slime_rollout.ready import ReadyRollout
from slime_rollout.store import RolloutStore

SAMPLES, QUICK, TOKENS, PROMPT, GROUP, VERSION = 2048, 256, 8192, 256, 8, 3
DRIVER_GOAL, ALL_GOAL, MEMORY_GOAL = 0.5, 3.0, 3.0
SHAPE = ModelShape(
    family="qwen3",
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
)

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round took: wall and CPU seconds, and bytes."""

    all: float
    driver: float
    worker: float
    write: float
    worker_bytes: int
    rank_bytes: int


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure.

    Args:
        out: Where rollouts are written down.
        quick: 256 samples and two rounds instead of 2,048 and four.
    """
    samples = QUICK if quick else SAMPLES
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = (
        f"{Path(__file__).parent}{os.pathsep}{given}"  # where Ray's workers find the classes below
    )
    with ray_runtime(ClusterConfig(), address=None):
        import ray  # after its settings

        worker = ray.remote(RolloutSide).options(num_cpus=0, max_concurrency=1).remote(samples)
        rank = ray.remote(TrainerSide).options(num_cpus=0).remote()
        size: int = ray.get(worker.array_bytes.remote())
        rounds = [one_round(worker, rank, spec_of(samples, out)) for _ in range(2 if quick else 4)]
    case = f"{samples:,} samples of {TOKENS:,} tokens"
    memory = max(one.worker_bytes + one.rank_bytes for one in rounds) / size
    return [
        Record(case, "driver", min(one.driver for one in rounds), "s", False, DRIVER_GOAL),
        Record(case, "all", min(one.all for one in rounds), "s", False, ALL_GOAL),
        Record(case, "worker", min(one.worker for one in rounds), "s", False),
        Record(case, "write", min(one.write for one in rounds), "s", False),
        Record(case, "memory", memory, "x", False, MEMORY_GOAL),
        Record(case, "arrays", size / 2**20, "MiB"),
    ]


def one_round(worker: Any, rank: Any, given: BatchSpec) -> Round:
    """From Samples in the worker to a micro-batch in the rank."""
    import ray

    cpu, start = time.process_time(), time.perf_counter()
    ready, worker_seconds, write, worker_bytes = ray.get(worker.prepare.remote(given))
    rank_bytes = ray.get(rank.first_micro_batch.remote(ready.shards))
    end, driver = time.perf_counter(), time.process_time() - cpu
    taken = Round(end - start, driver, worker_seconds, write, worker_bytes, rank_bytes)
    print(taken, flush=True)
    return taken


def spec_of(samples: int, out: Path) -> BatchSpec:
    """One rank, one step, micro-batches of 8 samples."""
    words = ["--hf-checkpoint", "hf", "--load", "dist", "--prompt-data", "prompts.jsonl", "--micro-batch-size", "8"]
    words += ["--rollout-batch-size", str(samples // GROUP), "--n-samples-per-prompt", str(GROUP)]
    settings = parse_train([*words, "--global-batch-size", str(samples), "--num-rollout", "1"])
    return batch_spec(settings, SHAPE, 1, store=RolloutStore(out / "rollouts"), can_resume=True)


class RolloutSide:
    """The rollout worker, as far as the data goes: it has a scored rollout of Samples."""

    def __init__(self, samples: int) -> None:
        rng, numbers = random.Random(0), np.random.default_rng(0)
        response = TOKENS - PROMPT
        flat = [
            Sample(
                index=index,
                group_index=index // GROUP,
                prompt="How many?",
                tokens=[rng.randrange(150_000) for _ in range(TOKENS)],
                response_length=response,
                loss_mask=[1] * response,
                rollout_log_probs=numbers.standard_normal(response, np.float32).tolist(),
                weight_versions=[VERSION] * response,
                reward=float(index % 3 == 0),
                status=Status.COMPLETED,
            )
            for index in range(samples)
        ]
        groups = [flat[start : start + GROUP] for start in range(0, samples, GROUP)]
        metrics = rollout_metrics(flat)
        self._batch = RolloutBatch(rollout_id=0, groups=groups, weight_version=VERSION, metrics=metrics)

    def array_bytes(self) -> int:
        """Size of the rollout as arrays."""
        columns = self._batch.columns().samples.values()
        return sum(column.values.nbytes if isinstance(column, Ragged) else column.nbytes for column in columns)

    def prepare(self, given: BatchSpec) -> tuple[ReadyRollout, float, float, int]:
        """What the rollout worker does after the last reward; its CPU seconds, those of writing, and its memory."""
        import ray

        assert given.store is not None
        shutil.rmtree(given.store.path(0).parent, ignore_errors=True)
        store = TimedStore(given.store.path(0).parent)
        given, cpu = dataclasses.replace(given, store=store), time.process_time()
        ready, most = with_peak(lambda: prepare_rollout(self._batch, given, state_dict=dict[str, Any], put=ray.put))
        return ready, time.process_time() - cpu, store.seconds, most


class TimedStore(RolloutStore):
    """Says how long writing took."""

    seconds = 0.0

    def write(self, batch: RolloutColumns, source_state: dict[str, Any] | None = None) -> Path:
        """Write, and take the time."""
        start = time.perf_counter()
        path = super().write(batch, source_state)
        self.seconds = time.perf_counter() - start
        return path


class TrainerSide:
    """A trainer rank, as far as the data goes."""

    def __init__(self) -> None:
        importlib.import_module("slime_megatron.model.packing")  # a rank has imported it long before

    def first_micro_batch(self, references: list[Any]) -> int:
        """Fetch the shard and pack its first micro-batch; gives the largest memory."""
        import ray

        from slime_megatron.model.packing import MicroBatch

        def fetch() -> None:
            shard = ray.get(references[0])
            samples = [shard.samples[at] for at in shard.steps[0].micro_batches[0]]
            packed = MicroBatch(samples, share_prompts="off").pack()
            assert len(packed.targets_M) == len(samples) * (TOKENS - PROMPT)

        return with_peak(fetch, ("RssAnon",))[1]  # the shard is shared with the worker, where it was counted


def with_peak(call: Callable[[], Result], fields: Sequence[str] = ("RssAnon", "RssShmem")) -> tuple[Result, int]:
    """The call's result, and by how many bytes this process's memory grew at most: its own, and what it shares."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free must not hide what is taken
    before, most, done = _bytes(fields), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], _bytes(fields) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return call(), most[0]
    finally:
        done.set()
        thread.join()


def _bytes(fields: Sequence[str]) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(tuple(fields)))
