"""Processes that compute for `scripts/gpu-check`, each with a GPU of its own, or on the CPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from slime_core.types import Rendezvous

CALL_SECONDS = 900.0
STOP_SECONDS = 20.0


class CheckError(Exception):
    """A rank raised, died or did not answer."""


class Ranks:
    """Rank processes, each with one GPU (or none); they are called together and can be used again.

    Args:
        world: How many.
        device: `cuda` or `cpu`.
    """

    def __init__(self, world: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world):
            gpu = "" if device == "cpu" else (given or [str(number) for number in range(world)])[rank]
            # Megatron-core warns of much that is meant here.
            with _variables({"CUDA_VISIBLE_DEVICES": gpu, "PYTHONWARNINGS": "ignore"}):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, world))
                process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def call(self, module: str, function: str, *args: Any) -> list[Any]:
        """Call a function of a module on every rank, with its `Rendezvous` first; the answers, rank by rank.

        Raises:
            CheckError: A rank raised, ended or took too long.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for end in self._ends:
            end.send((module, function, args, port))
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(CALL_SECONDS):
                raise CheckError(f"rank {rank} did not answer within {CALL_SECONDS:.0f} s")
            try:
                good, answer = end.recv()
            except EOFError:
                raise CheckError(f"rank {rank} died") from None
            if not good:
                raise CheckError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def stop(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Have environment variables while processes are started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _serve(connection: Connection, rank: int, world: int) -> None:
    while True:
        try:
            module, function, args, port = connection.recv()
        except EOFError:
            return
        meeting = Rendezvous(rank=rank, world_size=world, address="127.0.0.1", port=port)
        try:
            answer = (True, getattr(importlib.import_module(module), function)(meeting, *args))
        except Exception as error:
            traceback.print_exc()
            first, *_ = str(error).splitlines() or [""]
            answer = (False, f"{type(error).__name__}: {first}")
        connection.send(answer)
        gc.collect()  # models are in cycles of references, and hold process groups, which have threads
