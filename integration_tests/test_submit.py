"""The command that `slime-launch submit` prints, run as a job on a cluster of Ray's with its dashboard."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import psutil
import pytest
from kinds import conversation, data_command, make_chat_model, write_rows
from launching import LAUNCHER, Assets, rows, wait_for
from packaging.requirements import Requirement

RAY = Path(sys.executable).with_name("ray")
ROLLOUTS = 3
JOB_SECONDS = 150


def parts_of_the_dashboard() -> list[str]:
    """What ray[default] needs and is not installed here."""
    extra = [Requirement(line) for line in requires("ray") or ()]
    missing = []
    for one in extra:
        if one.marker is None or not one.marker.evaluate({"extra": "default"}):
            continue
        try:
            distribution(one.name)
        except PackageNotFoundError:
            missing.append(f"{one.name}{one.specifier}")
    return missing


def free_ports(number: int) -> list[str]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


@contextmanager
def dashboard(work: Path) -> Iterator[str]:
    """The address of a dashboard, of a cluster of one node that listens on this machine's loopback address alone."""
    port, own, *others = free_ports(5)
    flags = ["--dashboard-agent-listen-port", "--dashboard-agent-grpc-port", "--metrics-export-port"]
    words = ["start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", port, "--num-cpus", "2"]
    words += ["--dashboard-host", "127.0.0.1", "--dashboard-port", own, "--include-dashboard", "true"]
    words += [word for pair in zip(flags, others, strict=True) for word in pair]
    words += ["--object-store-memory", str(128 * 2**20), "--disable-usage-stats"]
    log = work / "cluster.txt"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, log.open("wb") as out:
        process = subprocess.Popen(
            [RAY, *words, "--temp-dir", directory],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"RAY_raylet_start_wait_time_s": "120"},  # 30 are few for a dashboard
        )
        try:
            wait_for(lambda: b"Ray runtime started" in log.read_bytes(), "Ray", process=process, log=log)
            yield f"http://127.0.0.1:{own}"
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


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(400)
def test_what_is_printed_succeeds_as_a_job(llama: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = tmp_path / "extra"
    python = getattr(sys, "_base_executable", sys.executable)  # which has pip
    install = [python, "-m", "pip", "install", "--quiet", "--target", str(extra), *parts_of_the_dashboard()]
    subprocess.run(install, check=True, timeout=120)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(extra)])))
    monkeypatch.setenv("PATH", f"{LAUNCHER.parent}{os.pathsep}{os.environ['PATH']}")
    hf = Path(shutil.copytree(llama.hf, tmp_path / "hf"))
    assets = Assets(hf, llama.torch_dist, llama.prompts, llama.engine_python)
    make_chat_model(assets)
    data = write_rows(tmp_path / "train.jsonl", [conversation(number) for number in range(16)])
    _, _, *words = data_command(assets, tmp_path, "sft_loss", data, rollouts=ROLLOUTS)
    with dashboard(tmp_path) as address:
        submit = [str(LAUNCHER), "submit", "--ray-address", address, *words]
        printed = subprocess.run(submit, check=True, capture_output=True, text=True, timeout=240).stdout
        job = subprocess.run(shlex.split(printed), capture_output=True, text=True, timeout=JOB_SECONDS)
        told = job.stdout + job.stderr
        assert job.returncode == 0, told
        listed = subprocess.run([RAY, "job", "list", "--address", address], capture_output=True, text=True, timeout=240)
    assert "succeeded" in told
    assert "JobStatus.SUCCEEDED" in listed.stdout and "slime-launch train" in listed.stdout
    assert len(rows(tmp_path, "train")) == ROLLOUTS
