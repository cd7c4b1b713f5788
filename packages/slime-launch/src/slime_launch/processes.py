"""Processes of the run on the cluster's nodes, looked at and ended without their help: they may hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from slime_rollout.supervise.reaper import POLL_SECONDS, Process, find_process, send_signal

Result = TypeVar("Result")

END_SECONDS = 20.0
NODE_SECONDS = 30.0  # for a process of Ray to start on another node and to do what it is asked to


class Place(NamedTuple):
    """Where a worker runs: Ray's id of the node, and the process there."""

    node: str
    process: Process


def own_place() -> Place:
    """That of this process, a worker of Ray's."""
    import ray

    process = find_process(os.getpid())
    assert process is not None
    return Place(ray.get_runtime_context().get_node_id(), process)


def on_nodes(places: Sequence[Place], function: Callable[[list[Process]], Result]) -> list[Result]:
    """Call a function with the processes of each node, there. A node that does not answer is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes: dict[str, list[Process]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place.process)
    own = nodes.pop(ray.get_runtime_context().get_node_id(), None)
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(processes)
        for node, processes in nodes.items()
    ]
    results = [] if own is None else [function(own)]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=NODE_SECONDS) if calls else ([], [])
    for call in ready:
        try:
            results.append(ray.get(call))
        except ray.exceptions.RayError:  # the node is gone
            continue
    return results


def end_processes(processes: list[Process]) -> list[int]:
    """End processes, those stopped by SIGSTOP too, and wait until they are gone; gives the pids of what is not."""
    deadline = time.monotonic() + END_SECONDS
    while left := [process for process in processes if (now := find_process(process.pid)) == process and now.alive]:
        for process in left:
            send_signal(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return [process.pid for process in left]
