"""Machines of a cluster, as far as Ray and the run can tell: network namespaces, joined by a virtual switch.

Each has an address and a loopback of its own, and can be cut off or lost. Files and memory are the host's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from launching import wait_for, wait_until_gone

# `ray start`, without what no run asks: the agents of metrics and the collectors of logs of six machines on one host.
RAY = """
from ray.scripts.scripts import main
from slime_launch.ray_runtime import AGENT_WAITS, without_services
with without_services(AGENT_WAITS):
    main()
"""
PORT = 6379
CABLE = "cable"
DETOUR = "another"
RAY_PORTS = range(10100, 10200)  # of its workers, in the run's own processes
OBJECT_STORE = 128 * 2**20


def can_make_nodes() -> bool:
    """Whether this user may make network namespaces here."""
    name = f"slime-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    except OSError:
        return False
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made.returncode == 0


@dataclass
class Machine:
    """A network namespace with shared memory of its own, and a Ray node in it."""

    name: str
    address: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    holder: subprocess.Popen[str] | None = None

    def hold(self) -> None:
        """Make its shared memory, by which SGLang tells whether two ranks are on one machine."""
        script = "mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity"
        words = ["ip", "netns", "exec", self.name, "sh", "-c", script]  # which gives it a mount namespace of its own
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "ready\n"

    def words(self, *command: str) -> list[str]:
        """A command that runs there."""
        assert self.holder is not None
        return ["nsenter", "--net", "--mount", f"--wd={Path.cwd()}", "--target", str(self.holder.pid), *command]

    def processes(self) -> list[psutil.Process]:
        """All that runs there."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        processes = []
        for pid in found.stdout.split():
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(int(pid)))
        return processes

    def running(self, *words: str) -> list[psutil.Process]:
        """What runs there with one of these words in its command line."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if any(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def join(self, *, head: str | None, cpus: int, directory: str) -> None:
        """Start its Ray node: the first of a cluster, or one more of the cluster that ``head`` began."""
        words = [sys.executable, "-c", RAY, "start", "--block"]
        words += ["--node-ip-address", self.address, "--num-cpus", str(cpus)]
        words += ["--object-store-memory", str(OBJECT_STORE), "--disable-usage-stats"]
        words += ["--min-worker-port", str(RAY_PORTS[0]), "--max-worker-port", str(RAY_PORTS[-1])]
        if head is None:
            words += ["--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", directory]
        else:
            words += ["--address", _meeting(head)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(self.words(*words), stdout=out, stderr=out, start_new_session=True)
        ready = b"Ray runtime started"
        wait_for(lambda: ready in self.log.read_bytes(), f"Ray on {self.name}", process=self.process, log=self.log)

    def listening(self) -> set[tuple[str, str, int]]:
        """Process, address and port of every TCP socket on which something listens there."""
        shown = subprocess.run(["ip", "netns", "exec", self.name, "ss", "-Htlnp"], capture_output=True, text=True)
        found = set()
        for line in shown.stdout.splitlines():
            where, users = line.split()[3], line.split()[5:]
            address, _, port = where.rpartition(":")
            address = address.strip("[]").partition("%")[0].removeprefix("::ffff:")  # IPv4 written as IPv6
            found.add((" ".join(users), address, int(port)))
        return found

    def cut_off(self) -> None:
        """Take its cable away; whoever talks to it waits in vain."""
        _ip("-n", self.name, "link", "set", CABLE, "down")

    def shut_down(self) -> None:
        """Have its Ray node leave in order, as ``ray stop`` does; what it has started ends with it."""
        raylets = [process for process in self.processes() if process.name() == "raylet"]
        raylet = min(raylets, key=psutil.Process.create_time)  # what it starts has its name for a moment
        raylet.terminate()
        assert wait_until_gone([raylet], 60) == []

    def lose(self) -> None:
        """End everything on it at once."""
        while processes := self.processes():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        for ended in filter(None, (self.process, self.holder)):
            ended.wait(10)


@dataclass
class Machines:
    """A cluster of such machines; the first one is its head."""

    work: Path
    switch: str
    directory: str
    ipv6: bool = False
    detour: bool = False
    all: list[Machine] = field(default_factory=list)

    @property
    def first(self) -> Machine:
        """The head, where commands of a run belong."""
        return self.all[0]

    def add(self, *, cpus: int | None) -> Machine:
        """One more machine, which joins the cluster, unless it has ``None`` as its CPUs."""
        number = len(self.all) + 1
        address = f"fd77::{number}" if self.ipv6 else f"10.77.0.{number}"
        machine = Machine(f"{self.switch}-{number}", address, self.work / f"node-{number}.txt")
        _ip("netns", "add", machine.name)
        head = self.first.address if self.all else None
        self.all.append(machine)
        if self.detour:
            self._add_detour(machine, number)
        port = f"port{number}"
        _ip("link", "add", CABLE, "netns", machine.name, "type", "veth", "peer", "name", port, "netns", self.switch)
        _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
        place = (f"{machine.address}/64", "nodad") if self.ipv6 else (f"{machine.address}/24",)
        _ip("-n", machine.name, "address", "add", *place, "dev", CABLE)
        for interface in ("lo", CABLE):
            _ip("-n", machine.name, "link", "set", interface, "up")
        machine.hold()
        if cpus is not None:
            machine.join(head=head, cpus=cpus, directory=self.directory)
        return machine

    def _add_detour(self, machine: Machine, number: int) -> None:
        """A first interface, which has the default route and leads to no other machine."""
        end = f"nowhere{number}"
        _ip("link", "add", DETOUR, "netns", machine.name, "type", "veth", "peer", "name", end, "netns", self.switch)
        _ip("-n", self.switch, "link", "set", end, "up")
        _ip("-n", machine.name, "address", "add", f"10.78.{number}.2/24", "dev", DETOUR)
        _ip("-n", machine.name, "link", "set", DETOUR, "up")
        _ip("-n", machine.name, "route", "add", "default", "via", f"10.78.{number}.1", "dev", DETOUR)


@contextmanager
def machines(work: Path, *, cpus: Sequence[int | None], ipv6: bool = False, detour: bool = False) -> Iterator[Machines]:
    """Machines in a Ray cluster, by their CPUs. Ray takes one for lost after about twelve seconds of silence.

    With ``detour`` each has a second interface, with the default route, by which nobody can be reached.
    """
    switch = f"slime-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        for name, value in {"period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 3}.items():
            patch.setenv(f"RAY_health_check_{name}", str(value))
        patch.setenv("RAY_raylet_start_wait_time_s", "300")  # 30 are few on a slow machine
        cluster = Machines(work, switch, directory, ipv6, detour)
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for each in cpus:  # one after the other: nodes of one host that start together take each other's ports
                cluster.add(cpus=each)
            patch.setenv("RAY_ADDRESS", _meeting(cluster.first.address))
            yield cluster
        finally:
            for machine in reversed(cluster.all):
                machine.lose()
            for name in (*(machine.name for machine in cluster.all), switch):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _meeting(head: str) -> str:
    """Where Ray's head listens, as Ray takes it."""
    return f"[{head}]:{PORT}" if ":" in head else f"{head}:{PORT}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
