"""Real processes are started and killed here."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from slime_rollout import supervise
from slime_rollout.supervise import Supervised, SupervisionError, reaper

GRACE = 1.0
START = "from slime_rollout.supervise import Supervised\ns = Supervised.start(command, grace=1.0)\n"


@pytest.fixture
def tree(marked):
    with Supervised.start(marked.tree(), grace=GRACE) as supervised:
        marked.wait_ready()
        yield supervised


def test_stop_ends_the_whole_tree_and_nothing_else(marked, tree, bystander):
    assert len(marked.pids()) > 4
    tree.stop()
    assert marked.pids() == []
    assert bystander.poll() is None
    assert tree.poll() == 128 + signal.SIGTERM
    assert tree.stop() == tree.poll()


def test_stubborn_process_is_killed_only_after_its_grace(marked):
    with Supervised.start(marked.tree(), grace=3.0) as supervised:
        marked.wait_ready()
        supervised.request_stop()
        marked.wait_until(lambda: len(marked.pids()) <= 2, what="only the stubborn one and the supervisor")
        assert len(marked.pids("\0stubborn")) == 1
        marked.wait_gone()


def test_command_that_ends_takes_its_descendants_along(marked):
    with Supervised.start(marked.tree("sys.exit(7)"), grace=GRACE) as supervised:
        assert supervised.wait(20) == 7
        assert marked.pids() == []


def test_sigterm_to_the_supervisor_ends_the_tree(marked, tree):
    os.kill(tree.pid, signal.SIGTERM)
    assert tree.wait(10) == 128 + signal.SIGTERM
    assert marked.pids() == []


def test_second_signal_does_not_wait_for_the_grace_period(marked):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with Supervised.start(marked.tree(stubborn), grace=60.0) as supervised:
        marked.wait_ready()
        supervised.signal(signal.SIGTERM)
        time.sleep(0.2)  # two pending signals of one kind are one
        supervised.signal(signal.SIGTERM)
        assert supervised.wait(10) == 128 + signal.SIGKILL
        assert marked.pids() == []


def test_killed_starter_leaves_nothing(marked, bystander):
    with marked.starter(START + "time.sleep(600)") as starter:
        marked.wait_ready()
        starter.kill()
    marked.wait_gone()


def test_starter_killed_at_once_leaves_nothing(marked):
    with marked.starter(START + "os.kill(os.getpid(), signal.SIGKILL)") as starter:
        starter.wait(20)
    marked.wait_gone()


def test_child_forked_by_python_does_not_keep_the_tree_alive(marked):
    body = START + "if os.fork() == 0:\n    print('forked'); time.sleep(4); os._exit(0)\ntime.sleep(600)"
    with marked.starter(body) as starter:
        marked.wait_ready()
        starter.kill()
        marked.wait_until(lambda: not marked.pids("\0stubborn"), 3.5, "end of the tree before the forked child")
    marked.wait_gone()


def test_child_forked_in_c_does_not_keep_the_tree_alive(marked):
    body = START + "import ctypes\nif ctypes.CDLL(None).fork() == 0:\n    time.sleep(8); os._exit(0)\ntime.sleep(600)"
    with marked.starter(body) as starter:
        marked.wait_ready()
        starter.kill()
        marked.wait_until(lambda: not marked.pids("\0stubborn"), 6.0, "end of the tree before the forked child")
    marked.wait_gone()


def test_stop_does_not_wait_for_a_child_forked_in_c(marked):
    body = START + "import ctypes\nif ctypes.CDLL(None).fork() == 0:\n    time.sleep(60); os._exit(0)\n"
    body += "s.stop(8.0)\nos._exit(s.poll() - 128)"
    with marked.starter(body) as starter:
        assert starter.wait(20) == signal.SIGTERM
        left = marked.pids()
        assert len(left) == 1  # the child
        os.kill(left[0], signal.SIGKILL)


def test_a_starter_with_thousands_of_open_files(marked):
    """As a rollout with a thousand requests in flight, when an engine is replaced."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, Path("/dev/null").open() as file:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        for _ in range(1100):
            stack.callback(os.close, os.dup(file.fileno()))
        with Supervised.start(marked.tree(), grace=GRACE) as supervised:
            marked.wait_ready()
            assert supervised.stop() == 128 + signal.SIGTERM
        with Supervised.start(["sh", "-c", "exit 5"]) as supervised:
            assert supervised.wait(20) == 5


# Opens the files named by its arguments, says so, and goes on.
OPEN = """
import sys, time
files = [open(name) for name in sys.argv[1:]]
open(sys.argv[1] + ".opened", "w").close()
time.sleep(600)
"""


@pytest.fixture
def files(tmp_path):
    """Two files to remove, if they are open; the second and the third one are not, or of another name."""
    paths = [tmp_path / name for name in ("loads_own", "loads_others", "other")]
    for path in paths:
        path.touch()
    return paths


@pytest.fixture
def opener(files, marked):
    """Starts a command that has the first and the last file open."""
    own, _, other = files
    command = [sys.executable, "-c", OPEN, str(own), str(other), marked.mark]
    Path(marked.mark).touch()
    with Supervised.start(command, grace=GRACE, remove_files=str(own.with_name("loads_"))) as supervised:
        marked.wait_until(own.with_name("loads_own.opened").exists, 20.0, "opening of the files")
        yield supervised


def end_by_stop(supervised, marked):
    supervised.stop()


def end_by_sigkill_of_the_command(supervised, marked):
    """The supervisor looks once a second, so it has seen the files by then."""
    time.sleep(2.0)
    (command,) = reaper.descendants(supervised.pid)
    reaper.send_signal(command, signal.SIGKILL)
    supervised.wait(20)


@pytest.mark.parametrize("end", [end_by_stop, end_by_sigkill_of_the_command])
def test_files_that_the_tree_leaves_are_removed_and_no_others(files, opener, marked, end):
    own, others, other = files
    assert own.exists()
    end(opener, marked)
    assert (own.exists(), others.exists(), other.exists()) == (False, True, True)


@pytest.mark.parametrize("end", ["stop", "kill", "by itself"])
def test_a_folder_of_the_tree_is_removed(tmp_path, end):
    folder = tmp_path / "of the tree"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    command = ["true"] if end == "by itself" else ["sleep", "60"]
    with Supervised.start(command, grace=GRACE, folder=folder) as supervised:
        if end != "by itself":
            assert folder.exists()
            getattr(supervised, end)()
        supervised.wait(20)
    assert not folder.exists()
    assert (tmp_path / "other").exists()


def test_log_tail_exit_code_and_environment(tmp_path):
    code = "print(*range(50), sep=chr(10), flush=True); print(os.environ['WORD'], file=sys.stderr); sys.exit(3)"
    log = tmp_path / "log.txt"
    with Supervised.start(
        [sys.executable, "-c", "import os, sys; " + code], env={"WORD": "here"}, log_path=log
    ) as supervised:
        assert supervised.wait(20) == 3
        assert supervised.log_tail(3) == "48\n49\nhere"


def test_a_long_line_does_not_hide_those_below_it(tmp_path):
    log = tmp_path / "log"
    words = [sys.executable, "-c", "print('first'); print('x' * 20_000); print('the error')"]
    with Supervised.start(words, log_path=log) as supervised:
        supervised.wait(30)
        assert supervised.log_tail(3) == "first\n" + "x" * 400 + "\nthe error"


def test_log_tail_is_of_this_process_alone(tmp_path):
    log = tmp_path / "log.txt"
    for word in ("first", "second"):
        with Supervised.start(["echo", word], log_path=log) as supervised:
            supervised.wait(20)
            assert supervised.log_tail() == word
    assert log.read_text() == "first\nsecond\n"


def test_kill_ends_a_stopped_tree_and_its_stopped_supervisor_at_once(marked):
    with Supervised.start(marked.tree(), grace=60.0) as supervised:
        marked.wait_ready()
        os.kill(supervised.pid, signal.SIGSTOP)
        for pid in marked.pids():
            os.kill(pid, signal.SIGSTOP)
        supervised.kill()
        assert supervised.wait(10) == 128 + signal.SIGKILL
        assert marked.pids() == []
        supervised.kill()  # nothing is left to kill


def test_program_that_does_not_exist(tmp_path):
    with Supervised.start(["/nonexistent/program"], log_path=tmp_path / "log.txt") as supervised:
        assert supervised.wait(20) == 127
        assert "cannot start /nonexistent/program" in supervised.log_tail()


def test_log_in_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(SupervisionError, match="No such file or directory"):
        Supervised.start(["true"], log_path=tmp_path / "missing" / "log.txt")


def test_stop_that_takes_too_long_is_an_error(marked, tree):
    with pytest.raises(SupervisionError, match="still busy"):
        tree.stop(timeout=0.01)


def test_command_that_ends_at_once_is_noticed_at_once():
    """Ten times, because the command may end before the supervisor has looked at it."""
    for code in range(10):
        started = time.monotonic()
        with Supervised.start(["sh", "-c", f"exit {code}"]) as supervised:
            assert supervised.wait(20) == code
        assert time.monotonic() - started < 10.0


def test_pipe_does_not_leak_into_other_programs():
    with Supervised.start(["sleep", "600"], grace=GRACE) as supervised:
        other = subprocess.Popen(["sleep", "600"], close_fds=False)
        try:
            supervised.request_stop()
            supervised.wait(10)
        finally:
            other.kill()
            other.wait()


TOP = """
from slime_rollout.supervise import under_supervisor
with under_supervisor(command, grace=1.0) as wait:
    code = wait()
sys.exit(code)
"""
LEFT = """
from slime_rollout.supervise import under_supervisor
with under_supervisor(command, grace=60.0):
    input()
print("left", flush=True)
input()
"""


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
    with supervise._forwarding(Tree(), received):
        os.kill(os.getpid(), signal.SIGTERM)
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
        assert top.wait(10) == 128 + signal.SIGINT
    assert marked.pids() == []


def test_a_command_that_outlasts_its_grace_period_has_the_code_of_the_signal(marked):
    with marked.starter(TOP, then="signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)") as top:
        marked.wait_ready()
        top.send_signal(signal.SIGTERM)
        assert top.wait(20) == 128 + signal.SIGTERM
    assert marked.pids() == []


def test_exit_code_is_passed_on(marked):
    with marked.starter(TOP, then="sys.exit(5)") as top:
        assert top.wait(20) == 5
    assert marked.pids() == []


def test_a_block_that_is_left_without_waiting_kills_everything(marked):
    body = {"then": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"}
    with marked.starter(LEFT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **body) as top:
        marked.wait_ready()
        started = time.monotonic()
        top.stdin.write(b"\n")
        top.stdin.flush()
        assert top.stdout.readline() == b"left\n"
        assert time.monotonic() - started < 20
        assert marked.pids() == [top.pid]
        top.kill()
