"""Trainer ranks in processes of their own, called together."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous, TrainSample, WeightUpdate
from slime_megatron.service import MegatronConfig, start_worker
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.addresses import free_port

if TYPE_CHECKING:
    from slime_megatron.worker import MegatronWorker

CALL_SECONDS = 120.0
# Imports take longer than everything that a rank does here. A process that has them is forked for each rank.
PRELOAD = [Path("imported_megatron.py").stem]  # by a name that `scripts/test --changed` sees


class Ranks:
    """`world_size` trainer ranks; a context manager that ends them.

    Args:
        world_size: Number of processes.
        config: The trainer's settings.
        algorithm: The loss.
        shape: The model.
    """

    def __init__(self, world_size: int, config: MegatronConfig, algorithm: AlgorithmConfig, shape: ModelShape) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            meeting = Rendezvous(rank=rank, world_size=world_size, address="127.0.0.1", port=port)
            process = context.Process(target=_serve, args=(theirs, config, algorithm, shape, meeting))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join(10)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(worker, *args)` on every rank; the answers, rank by rank."""
        for end in self._ends:
            end.send((function, args))
        answers = []
        for rank, end in enumerate(self._ends):
            assert end.poll(CALL_SECONDS), f"rank {rank} did not answer {function.__name__}"
            good, answer = end.recv()
            assert good, f"rank {rank}: {answer}"
            answers.append(answer)
        return answers


def train(worker: MegatronWorker, shards: list[Any]) -> dict[str, float]:
    """Train on one rollout; the metrics of its last optimizer step."""
    return worker.train(shards[worker.data_parallel_rank]).steps[-1]


def log_probs(worker: MegatronWorker, shards: list[Any]) -> list[list[float]]:
    """Log-probs of each sample's response tokens."""
    return [row.tolist() for row in worker.forward(shards[worker.data_parallel_rank])]


def other_experts(worker: MegatronWorker, shards: list[Any]) -> tuple[int, int]:
    """How many pairs of a token and a layer go to other experts than the engine named, as the trainer computes them
    without replay, and how many there are. One rank."""
    import torch

    from slime_megatron.model.build import run
    from slime_megatron.model.packing import MicroBatch
    from slime_megatron.model.routing import Routing

    [chunk], unlike, pairs = worker.model, 0, 0
    for sample in shards[0].samples:
        batch = MicroBatch([sample], share_prompts="off").pack(replays=True)
        assert batch.routing is not None and batch.routing.engine_TW is not None
        named = batch.routing.engine_TW.view(len(batch.tokens_T), chunk.config.num_layers, -1)
        made = Routing(recording=True)
        with torch.no_grad():
            run(chunk, dataclasses.replace(batch, routing=made))
        for layer, chosen in made.recorded.items():
            unlike += int((chosen.sort(-1).values != named[:, layer].sort(-1).values).any(-1).sum())
            pairs += len(chosen)
    return unlike, pairs


def push(worker: MegatronWorker, channel: Any, version: int) -> int:
    """Send the weights; the version that the engines confirmed."""
    return worker.push(WeightUpdate(version=version), channel).version


def export_mismatches(worker: MegatronWorker) -> list[str]:
    """Weights that are gathered otherwise than they are."""
    return worker.export_mismatches()


def inspect(worker: MegatronWorker, channel: Any, version: int) -> str:
    """What engines hold wrong, in words; nothing if they hold what is gathered."""
    try:
        worker.push(WeightUpdate(version=version), channel)
    except WeightSyncError as error:
        return str(error)
    return ""


def nudge(worker: MegatronWorker, seed: int) -> None:
    """Move every weight a little, as a step of training does."""
    import torch

    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for chunk in worker.model:
            for weight in chunk.parameters():
                weight += 1e-3 * torch.randn(weight.shape, generator=dice)


def save(worker: MegatronWorker, iteration: int) -> str:
    """Write a checkpoint; its directory."""
    return worker.save(iteration)


def logits(worker: MegatronWorker, tokens: list[int]) -> list[list[float]]:
    """Logits that predict every token of a text but the first, over the true vocabulary."""
    import torch

    from slime_megatron.model.build import output_weight, run
    from slime_megatron.model.packing import MicroBatch

    sample = TrainSample(
        index=0,
        group_index=0,
        tokens=np.array(tokens, np.int32),
        response_length=len(tokens) - 1,
        loss_mask=np.ones(len(tokens) - 1, np.uint8),
        trajectory_tokens=len(tokens) - 1,
        reward=0.0,
        raw_reward=0.0,
    )
    with torch.no_grad():
        [chunk], batch = worker.model, MicroBatch([sample], share_prompts="off").pack()
        rows = run(chunk, batch)[0].index_select(0, batch.logit_rows_M) @ output_weight(chunk).t()
    return rows.float()[:, : worker.shape.vocab_size].tolist()


def _serve(connection: Connection, *settings: Any) -> None:
    try:
        worker = start_worker(*settings)
    except Exception as error:
        connection.recv()
        connection.send((False, repr(error)))
        return
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, function(worker, *args)))
        except Exception as error:
            connection.send((False, repr(error)))
    worker.close()
