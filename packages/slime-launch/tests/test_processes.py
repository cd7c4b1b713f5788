"""Processes of a run on this node: found by their logs, and ended though they are stopped."""

from __future__ import annotations

import signal
import subprocess
import time

from slime_launch.processes import Run, end_processes, look_at, on_nodes, processes_of
from slime_rollout.supervise.reaper import is_stopped


def test_a_stopped_process_is_named_and_can_be_ended(tmp_path):
    log = tmp_path / "trainer-0.log"
    with log.open("w") as file, subprocess.Popen(["sleep", "60"], stdout=file) as child:
        run = Run(str(tmp_path), {str(log): "trainer rank 0"}, signal.SIGUSR2)
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not is_stopped(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        [found] = processes_of(run)
        assert (found.process.pid, found.name, found.is_worker) == (child.pid, "trainer rank 0", True)
        stopped, stacks = look_at([run])
        assert stopped == [f"trainer rank 0 (process {child.pid})"] and stacks.startswith(stopped[0])
        assert end_processes([found.process]) == [] and child.wait() == -signal.SIGKILL


def test_without_a_question_no_node_is_asked():
    assert on_nodes([], end_processes) == []
