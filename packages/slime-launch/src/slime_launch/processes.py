"""Processes of the run on the cluster's nodes, looked at and ended without their help: they may hang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from slime_rollout.supervise import POLL_SECONDS, Process, descendants, find_process, is_stopped, send_signal

Result = TypeVar("Result")
Asked = TypeVar("Asked")

END_SECONDS = 20.0
STACK_SECONDS = 3.0
ATTEMPTS = 3
COMMAND_LENGTH = 80
NODE_SECONDS = 30.0  # for a process of Ray to start on another node and to do what it is asked to


class Place(NamedTuple):
    """Where a worker runs: Ray's id of the node, and the process there."""

    node: str
    process: Process


class Run(NamedTuple):
    """How to tell a run's processes: they, and what they start, write to files of ``log_dir``.

    ``workers`` are the names of its workers by their logs; each writes its stacks there itself on the
    signal ``signum``.
    """

    log_dir: str
    workers: Mapping[str, str]
    signum: int


class RunProcess(NamedTuple):
    """A process of a run: its name, its log, and whether it is a worker itself, not a child of one."""

    process: Process
    name: str
    log: str
    is_worker: bool


def own_place() -> Place:
    """That of this process, a worker of Ray's."""
    process = find_process(os.getpid())
    assert process is not None
    return Place(own_node(), process)


def own_node() -> str:
    """Ray's id of the node of this process, which Ray knows without asking anybody."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def on_nodes(asked: Sequence[tuple[str, Asked]], function: Callable[[list[Asked]], Result]) -> list[Result]:
    """Call a function with all that is asked of a node, there. A node that does not answer is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not asked:  # perhaps Ray is not up yet, and would be started by a question
        return []
    nodes: dict[str, list[Asked]] = {}
    for node, what in asked:
        nodes.setdefault(node, []).append(what)
    own = nodes.pop(own_node(), None)
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


def look_at(runs: Sequence[Run]) -> tuple[list[str], str]:
    """Which processes of runs on this node are stopped by a signal, in words, and the stacks of all."""
    stopped, stacks = [], []
    for run in runs:
        for found in processes_of(run):
            words = f"{found.name} (process {found.process.pid})"
            if is_stopped(found.process.pid):
                stopped.append(words)
            stacks.append(f"{words}:\n{_stacks(found, run.signum)}")
    return stopped, "\n".join(stacks)


def processes_of(run: Run) -> list[RunProcess]:
    """Those on this node, by their logs."""
    logs = {process: _log(process.pid) for process in _all_processes()}
    by_pid = {process.pid: log for process, log in logs.items()}
    found = []
    for process, log in logs.items():
        if not log.startswith(f"{run.log_dir}/"):
            continue
        is_worker = log in run.workers and by_pid.get(process.parent) != log
        name = run.workers[log] if is_worker else _command(process.pid)
        if log in run.workers and not is_worker:
            name += f" of {run.workers[log]}"
        found.append(RunProcess(process, name, log, is_worker))
    return sorted(found, key=lambda one: (one.log, one.process.pid))


def stopped_below(known: str) -> tuple[list[str], str]:
    """As of :func:`look_at`, those below this process that a signal has stopped, if ``known`` does not name them.

    They may belong to Ray, or to the run before they write to its logs.
    """
    stopped, stacks = [], []
    for process in descendants(os.getpid()):
        if is_stopped(process.pid) and (pid := f"(process {process.pid})") not in known:
            stopped.append(f"{_command(process.pid)} {pid}")
            stacks.append(f"{stopped[-1]}:\n{_stacks(RunProcess(process, '', '', is_worker=False))}")
    return stopped, "\n".join(stacks)


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").rstrip("\0 ")
    except OSError:
        return "a process"
    words = text.split("\0" if "\0" in text else None) or [""]  # a process that was given a name has no words
    name = Path(words[0]).name
    text = " ".join([name, *words[1:3]]) if name.startswith("python") else name
    return text.partition("\n")[0][:COMMAND_LENGTH]


def _is_there(process: Process) -> bool:
    now = find_process(process.pid)
    return now is not None and now == process and now.alive


def _all_processes() -> list[Process]:
    found = (find_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None and process.alive]


def _log(pid: int) -> str:
    """The file that a process writes its output to; empty if that cannot be seen."""
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""


def _stacks(found: RunProcess, signum: int = 0) -> str:
    """The stacks of a process's threads: read by py-spy, which needs no help of it, else as a worker writes them."""
    problem = "py-spy is not there"
    tool = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    for _ in range(ATTEMPTS if tool is not None else 0):  # it reads while the process goes on
        try:
            words = [str(tool), "dump", "--nonblocking", "--pid", str(found.process.pid)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=STACK_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            problem = str(error)
            break
        if done.returncode == 0:
            return done.stdout
        problem = next(iter(done.stderr.splitlines()), f"py-spy ended with {done.returncode}")
    if found.is_worker and not is_stopped(found.process.pid):
        return _dumped(found, signum)
    return f"  no stacks: {problem}\n"


def _dumped(found: RunProcess, signum: int) -> str:
    """The stacks that a worker writes to its log on request, within a few seconds."""
    log = Path(found.log)
    before = log.stat().st_size if log.exists() else 0
    send_signal(found.process, signum)
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
