"""The topmost process of a launcher, run as one and killed in every way."""

import os
import signal
import time
from typing import ClassVar

import pytest

from slime_rollout.supervise import topmost

TOP = "from slime_rollout.supervise import run_under_supervisor\nsys.exit(run_under_supervisor(command, grace=1.0))"


@pytest.fixture
def top(marked):
    with marked.starter(TOP) as process:
        marked.wait_ready()
        yield process
        process.kill()
        marked.wait_gone()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_everything(marked, top, bystander, signum):
    top.send_signal(signum)
    # Python turns SIGINT into KeyboardInterrupt and then ends itself by that signal.
    assert top.wait(10) == 128 + signum
    assert marked.pids() == []


def test_a_signal_is_passed_on_once_whenever_it_comes():
    """A second one would end the tree without its grace period."""

    class Tree:
        passed: ClassVar = []

        def signal(self, signum):
            self.passed.append(signum)
            if signum == signal.SIGTERM:
                os.kill(os.getpid(), signal.SIGHUP)

    received = []
    with topmost._forwarding(received) as attach:
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
        attach(Tree())
        os.kill(os.getpid(), signal.SIGINT)
    assert Tree.passed == received == [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


def test_sigkill_of_the_topmost_process_alone(marked, top, bystander):
    top.kill()
    marked.wait_gone()


def test_sigkill_of_the_supervisor(marked, bystander, tmp_path):
    with (tmp_path / "stderr").open("w") as stderr, marked.starter(TOP, stderr=stderr) as top:
        marked.wait_ready()
        (supervisor,) = marked.pids("reaper.py")
        os.kill(supervisor, signal.SIGKILL)
        assert top.wait(10) == 128 + signal.SIGKILL
    assert marked.pids() == []
    assert "the supervisor was ended by signal 9" in (tmp_path / "stderr").read_text()


def test_sigkill_of_the_command(marked, top):
    (command,) = marked.pids("-c\0" + marked.tree()[2] + "\0" + marked.mark)[:1]
    os.kill(command, signal.SIGKILL)
    assert top.wait(10) == 128 + signal.SIGKILL
    assert marked.pids() == []


def test_second_signal_ends_at_once(marked):
    body = TOP.replace("grace=1.0", "grace=60.0")
    with marked.starter(body, then="signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)") as top:
        marked.wait_ready()
        top.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two pending signals of one kind are one
        top.send_signal(signal.SIGINT)
        assert top.wait(10) == 128 + signal.SIGKILL
    assert marked.pids() == []


def test_exit_code_is_passed_on(marked):
    with marked.starter(TOP, then="sys.exit(5)") as top:
        assert top.wait(20) == 5
    assert marked.pids() == []
