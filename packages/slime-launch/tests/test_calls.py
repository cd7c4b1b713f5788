import os
import signal
import subprocess
import sys

import pytest

from slime_launch.calls import SIGNALS, Watch, stopped_line
from slime_launch.errors import RunError, Stopped


@pytest.fixture
def watch():
    old = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield Watch()
    for signum, handler in old.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_noted_signal_ends_the_next_check(watch, signum, code):
    watch.listen(at_once=False)
    watch.check()
    os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signal.SIGTERM)  # the first one counts
    with pytest.raises(Stopped) as caught:
        watch.check()
    assert caught.value.exit_code == code


def test_a_part_that_is_gone_ends_the_next_check(watch):
    def gone() -> None:
        raise RunError("gone")

    watch.add(gone)
    with pytest.raises(RunError, match="gone"):
        watch.check()


def test_before_anything_runs_a_signal_ends_the_process_at_once():
    program = (
        "import os, signal, time; from slime_launch.calls import Watch\n"
        "Watch().listen(at_once=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 143
    assert done.stderr == "slime-launch: stopped by SIGTERM; the same command goes on from --save\n"


def test_a_run_whose_launcher_was_killed_says_so_whatever_signal_reached_it():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as launcher:
        assert stopped_line(signal.SIGTERM, launcher.pid).startswith("slime-launch: stopped by SIGTERM;")
        launcher.kill()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie, which nobody has waited for yet
        killed = f"slime-launch: stopped because its launcher (process {launcher.pid}) was killed; the same command"
        assert stopped_line(signal.SIGTERM, launcher.pid).startswith(killed)
    assert stopped_line(signal.SIGTERM, launcher.pid).startswith(killed)
