"""However a run ends, no process and no shared memory of it is left after thirty seconds; nothing else was touched."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launching import Assets, rows, shared_memory, started, train_command, tree, wait_for, wait_until_gone

GONE_SECONDS = 30.0


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else's that looks like one of ours."""
    process = subprocess.Popen([sys.executable, "-c", "input('sglang ray slime router')"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)


def _topmost(number: int) -> Callable[[list[psutil.Process]], None]:
    return lambda family: family[0].send_signal(number)


def _kill_one(*words: str) -> Callable[[list[psutil.Process]], None]:
    """Kill the first process of the run whose command line holds all of the words."""

    def kill(family: list[psutil.Process]) -> None:
        lines = {process: " ".join(process.cmdline()) for process in family[1:]}
        found = [process for process, line in lines.items() if all(word in line for word in words)]
        assert found, f"no process with {words} among {list(lines.values())}"
        found[-1].kill()

    return kill


CASES = {
    "finishes": (lambda family: None, {0}),
    "ctrl-c": (_topmost(signal.SIGINT), {130}),
    "sigterm": (_topmost(signal.SIGTERM), {143}),
    "sigkill": (_topmost(signal.SIGKILL), {-signal.SIGKILL}),
    "engine crashes": (_kill_one("sglang.launch_server"), {1}),
    "trainer crashes": (_kill_one("ray::", "Trainer"), {1}),
}
FULL = {
    "router crashes": (_kill_one("sglang_router"), {1}),
    "ray crashes": (_kill_one("raylet/raylet"), {1}),
    "supervisor crashes": (_kill_one("supervise/reaper.py", "slime_launch.driver"), {1, 137}),
}


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_nothing_is_left(case: str, qwen3: Assets, bystander: subprocess.Popen[bytes], tmp_path: Path) -> None:
    end, codes = {**CASES, **FULL}[case]
    command = train_command(qwen3, tmp_path, rollouts=4 if case == "finishes" else 100_000)
    with started(command, tmp_path / "log.txt") as process:
        wait_for(lambda: len(rows(tmp_path, "train")) >= 1, "the first step", process=process, log=tmp_path / "log.txt")
        family = tree(process)
        memory = shared_memory(family)
        end(family)
        code = process.wait(GONE_SECONDS)
        left = wait_until_gone(family, GONE_SECONDS)
    print(
        f"{case}: {len(family)} processes, exit code {code}, {len(left)} left; shared {[path.name for path in memory]}"
    )
    assert not left, left
    assert code in codes, (tmp_path / "log.txt").read_text(errors="replace")[-4000:]
    assert {path.name.partition("_")[0] for path in memory} == {"torch", "sglang"}
    assert not [path.name for path in memory if path.exists()]
    assert bystander.poll() is None
