"""How the parts of a run are stopped. What a run does with real parts is in `integration_tests`."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from slime_core.errors import SlimeError
from slime_launch.errors import Stopped
from slime_launch.run import name_stopped, stop_all


@pytest.mark.timeout(60)
def test_an_error_is_followed_by_the_processes_that_a_signal_has_stopped_and_it_does_not_name(capsys):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            name_stopped(SlimeError("no answer"))
            assert capsys.readouterr().err == ""
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            name_stopped(SlimeError("no answer"))
            said = capsys.readouterr().err
            assert said.startswith("slime-launch: stopped by a signal: ") and f"(process {child.pid})" in said
            name_stopped(SlimeError(f"a judge (process {child.pid}) did not answer"))
            name_stopped(Stopped(signal.SIGINT))
            assert capsys.readouterr().err == ""
        finally:
            child.kill()


def test_what_cannot_be_stopped_hides_neither_the_cause_nor_the_rest(capsys):
    stopped = []

    def fail():
        raise ValueError("the actor is gone")

    with pytest.raises(Stopped), contextlib.ExitStack() as stack:
        stack.callback(stopped.append, "first")
        stack.callback(fail)
        stack.callback(stopped.append, "last")
        try:
            raise Stopped(2)
        except BaseException:
            stop_all(stack)
            raise
    assert stopped == ["last", "first"]
    text = "slime-launch: could not stop everything in order: ValueError: the actor is gone\n"
    assert capsys.readouterr().err == text
