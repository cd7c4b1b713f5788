"""However a run ends, no process and no shared memory of it is left; nothing else was touched."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from ended import FOREVER, end_run, kill_one, trained
from launching import Assets, train_command

# Runs that other tests look at, too: see conftest.py for what ends them.
SHARED = {
    "finishes": ("resumed_run", {0}),
    "ctrl-c": ("learned_run", {130}),
    "sigterm": ("whole_run", {143}),
    "sigkill": ("killed_run", {-9}),
    "engine crashes": ("crashed_run", {1}),
}


def interrupt_while_workers_hang(family: list[psutil.Process]) -> None:
    """Ctrl-C, when Ray's workers are stopped and so cannot end anything in order."""
    for process in family[1:]:
        if " ".join(process.cmdline()).startswith("ray::"):
            process.suspend()
    family[0].send_signal(signal.SIGINT)


CRASHES = {
    "ctrl-c while workers hang": (interrupt_while_workers_hang, {130}),
    "trainer crashes": (kill_one("ray::", "Trainer"), {1}),
    "router crashes": (kill_one("sglang_router"), {1}),
    "ray crashes": (kill_one("raylet/raylet"), {1}),
    "supervisor crashes": (kill_one("supervise/reaper.py", "slime_launch.driver"), {1, 137}),
}


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [*SHARED, *(pytest.param(name, marks=pytest.mark.full) for name in CRASHES)])
def test_nothing_is_left(case: str, qwen3: Assets, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if case in SHARED:
        fixture, codes = SHARED[case]
        ended = request.getfixturevalue(fixture)
    else:
        end, codes = CRASHES[case]
        command = train_command(qwen3, tmp_path, "--trainer-max-restarts", "0", rollouts=FOREVER)
        ended = end_run(command, tmp_path, end, ready=trained(tmp_path, 1))
    print(f"{case}: {ended.processes} processes, exit code {ended.code}, {len(ended.left)} left; shared {ended.memory}")
    assert not ended.left, ended.left
    assert ended.code in codes, f"exit code {ended.code}\n{ended.text[-4000:]}"
    # torch's is there during an update of the weights alone
    assert {"sglang"} <= {name.partition("_")[0] for name in ended.memory} <= {"torch", "sglang"}
    assert not ended.memory_left
    assert ended.bystander_lives
