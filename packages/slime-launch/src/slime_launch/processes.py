"""Processes of the run on the cluster's nodes, looked at and ended without their help: they may hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from slime_rollout.supervise.reaper import POLL_SECONDS, Process, descendants, find_process, send_signal

Result = TypeVar("Result")
Asked = TypeVar("Asked")

END_SECONDS = 20.0
STACK_SECONDS = 3.0
NODE_SECONDS = 30.0  # for a process of Ray to start on another node and to do what it is asked to


class Place(NamedTuple):
    """Where a worker runs: Ray's id of the node, and the process there."""

    node: str
    process: Process


class Suspect(NamedTuple):
    """A worker that may hang: its name, its process, its log, and the signal by which it writes its stacks there."""

    name: str
    process: Process
    log_path: str
    signum: int


def own_place() -> Place:
    """That of this process, a worker of Ray's."""
    import ray

    process = find_process(os.getpid())
    assert process is not None
    return Place(ray.get_runtime_context().get_node_id(), process)


def on_nodes(asked: Sequence[tuple[str, Asked]], function: Callable[[list[Asked]], Result]) -> list[Result]:
    """Call a function with all that is asked of a node, there. A node that does not answer is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not asked:  # perhaps Ray is not up yet, and would be started by a question
        return []
    nodes: dict[str, list[Asked]] = {}
    for node, what in asked:
        nodes.setdefault(node, []).append(what)
    own = nodes.pop(ray.get_runtime_context().get_node_id(), None)
    results = [] if own is None else [function(own)]
    if not nodes:
        return results
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(there)
        for node, there in nodes.items()
    ]
    for call in ray.wait(calls, num_returns=len(calls), timeout=NODE_SECONDS)[0]:
        try:
            results.append(ray.get(call))
        except ray.exceptions.RayError:  # the node is gone
            continue
    return results


def end_processes(processes: list[Process]) -> list[int]:
    """End processes, those stopped by SIGSTOP too, and wait until they are gone; gives the pids of what is not."""
    deadline = time.monotonic() + END_SECONDS
    while left := [process for process in processes if _is_there(process)]:
        for process in left:
            send_signal(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return [process.pid for process in left]


def look_at(suspects: list[Suspect]) -> tuple[list[str], str]:
    """Which of them are stopped by a signal, in words, and the stacks of the threads of all others."""
    stopped, stacks = [], []
    for suspect in suspects:
        if not _is_there(suspect.process):
            continue
        if is_stopped(suspect.process.pid):
            stopped.append(f"{suspect.name} (process {suspect.process.pid})")
        else:
            stacks.append(f"{suspect.name} (process {suspect.process.pid}):\n{_dumped(suspect)}")
    return stopped, "\n".join(stacks)


def stopped_below() -> list[str]:
    """Command and pid of the processes below this one that a signal has stopped, in words."""
    return [
        f"{_command(process.pid)} (process {process.pid})"
        for process in descendants(os.getpid())
        if is_stopped(process.pid)
    ]


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, or a debugger, has stopped a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return "a process"
    name = Path(words[0]).name
    return " ".join([name, *words[1:3]]) if name.startswith("python") else name


def _is_there(process: Process) -> bool:
    now = find_process(process.pid)
    return now is not None and now == process and now.alive


def _dumped(suspect: Suspect) -> str:
    """What a process writes to its log when it is asked for its stacks, within a few seconds."""
    log = Path(suspect.log_path)
    before = log.stat().st_size if log.exists() else 0
    send_signal(suspect.process, suspect.signum)
    deadline, size = time.monotonic() + STACK_SECONDS, before
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS * 5)
        now = log.stat().st_size if log.exists() else 0
        if now > before and now == size:
            break
        size = now
    if size == before:
        return "  it did not write its stacks\n"
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace")
