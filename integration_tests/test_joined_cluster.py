"""A run on a Ray cluster that was there before: it leaves nothing of its own there, and the cluster as it was."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from launching import Assets, left_of, rows, shared_memory, started, train_command, wait_for, wait_until_gone

RAY = Path(sys.executable).with_name("ray")
GONE_SECONDS = 30.0
NODE = ("gcs_server", "raylet")
ASK = """
import ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print("answer:", ray.get(ray.remote(num_cpus=4)(lambda: 6 * 7).remote(), timeout=60))
"""


@contextmanager
def _cluster(log: Path) -> Iterator[psutil.Process]:
    """A Ray cluster of one node with four CPUs; gives its topmost process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, log.open("wb") as out:
        words = ["start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port)]
        words += ["--num-cpus", "4", "--object-store-memory", str(128 * 2**20), "--temp-dir", directory]
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


def _assert_as_before(cluster: psutil.Process, nodes: dict[int, str]) -> None:
    """The cluster's own processes live, nothing of a run is left, and all of its CPUs are free to work."""
    assert not (left := wait_until_gone(_ours(cluster), GONE_SECONDS)), left
    assert nodes and all(psutil.Process(pid).name() == name for pid, name in nodes.items())
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "answer: 42", done.stderr


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["finishes", pytest.param("is killed", marks=pytest.mark.full)])
def test_a_run_joins_a_cluster_and_leaves_it_as_it_was(end: str, qwen3: Assets, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with _cluster(tmp_path / "cluster.txt") as cluster:
        nodes = {process.pid: process.name() for process in cluster.children() if process.name() in NODE}
        rollouts = 2 if end == "finishes" else 100_000
        with started(train_command(qwen3, tmp_path, rollouts=rollouts, save=False), log) as process:
            wait_for(lambda: len(rows(tmp_path, "train")) >= 1, "the first step", process=process, log=log)
            ours = _ours(cluster)
            memory = shared_memory(ours)
            print(f"{len(ours)} processes of the run on the cluster; they share {[path.name for path in memory]}")
            if end == "finishes":
                assert process.wait(120) == 0, log.read_text()
            else:
                assert len(ours) >= 3  # trainer, rollout worker, engine
                process.kill()
                process.wait(10)
        _assert_as_before(cluster, nodes)
        assert {path.name.partition("_")[0] for path in memory} == {"torch", "sglang"}
        assert not left_of(memory, GONE_SECONDS)  # torch's manager removes its file when the rank is gone
