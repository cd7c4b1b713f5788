"""A Ray cluster that was there before a run joined it, and what the run leaves there."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ended import GONE_SECONDS, trained
from launching import RUN_SECONDS, left_of, shared_memory, started, wait_for, wait_until_gone

RAY = Path(sys.executable).with_name("ray")
NODE = ("gcs_server", "raylet")
ASK = """
import sys, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print("answer:", ray.get(ray.remote(num_cpus=float(sys.argv[1]))(lambda: 6 * 7).remote(), timeout=60))
"""


@dataclass(frozen=True)
class Joined:
    """What was seen of a run on a cluster, and of the cluster when the run was over.

    Attributes:
        work: The run's directory.
        text: What it printed.
        code: Its exit code.
        processes: How many of its processes the cluster ran.
        left: Those that were there still after `GONE_SECONDS`.
        memory: Names of the files in /dev/shm that they had.
        memory_left: Those that were there still.
        nodes_live: Whether the cluster's own processes are those of before.
        answer: What the cluster gave to a task that needs all of its CPUs.
    """

    work: Path
    text: str
    code: int
    processes: int
    left: list[str]
    memory: list[str]
    memory_left: list[str]
    nodes_live: bool
    answer: str


def run_on_cluster(command: list[str], work: Path, *, kill: bool) -> Joined:
    """Run on a cluster of its own, to the end or until it has made a step and is killed."""
    log = work / "log.txt"
    with ray_cluster(work / "cluster.txt") as cluster:
        nodes = {process.pid: process.name() for process in cluster.children() if process.name() in NODE}
        with started(command, log) as process:
            wait_for(trained(work, 1), "the first step", process=process, log=log)
            ours = _ours(cluster)
            memory = shared_memory(ours)
            if kill:
                process.kill()
            code = process.wait(RUN_SECONDS)
        left = wait_until_gone(_ours(cluster), GONE_SECONDS)
        nodes_live = bool(nodes) and all(
            psutil.pid_exists(pid) and psutil.Process(pid).name() == name for pid, name in nodes.items()
        )
        done = subprocess.run([sys.executable, "-c", ASK, "4"], capture_output=True, text=True, timeout=240)
        return Joined(
            work=work,
            text=log.read_text(errors="replace"),
            code=code,
            processes=len(ours),
            left=left,
            memory=[file.name for file in memory],
            # torch's manager removes its file when the rank is gone
            memory_left=left_of(memory, GONE_SECONDS),
            nodes_live=nodes_live,
            answer=done.stdout.strip() or done.stderr,
        )


@contextmanager
def ray_cluster(log: Path, *, gpus: int = 0) -> Iterator[psutil.Process]:
    """A Ray cluster of one node with four CPUs, and GPUs as far as Ray knows; gives its topmost process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, log.open("wb") as out:
        words = ["start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port)]
        words += ["--num-cpus", "4", "--num-gpus", str(gpus), "--temp-dir", directory]
        words += ["--object-store-memory", str(128 * 2**20)]
        words += ["--include-dashboard", "false", "--disable-usage-stats"]
        process = subprocess.Popen([RAY, *words], stdout=out, stderr=out, start_new_session=True)
        try:
            wait_for(lambda: b"Ray runtime started" in log.read_bytes(), "Ray", process=process, log=log)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAY_ADDRESS", address)
                yield psutil.Process(process.pid)
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            for left in family:
                if left.is_running():
                    left.kill()


def _ours(cluster: psutil.Process) -> list[psutil.Process]:
    """Processes of a run among those of the cluster."""
    words = ("TrainerRank", "RolloutHost", "sglang")
    return [
        process
        for process in cluster.children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and any(word in " ".join(process.cmdline()) for word in words)
    ]
