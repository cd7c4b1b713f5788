import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

# A tree that tries to survive: a child in its own session, one whose parent has gone (double fork), one that ignores
# SIGTERM. Every process carries a mark as its last argument, so a test finds its own processes and no others.
TREE = """
import os, signal, subprocess, sys, time
mark = sys.argv[1]
sleep = "import sys, time; open(sys.argv[1] + '.' + sys.argv[2], 'w').close(); time.sleep(600)"
def child(name, code=sleep, **kw):
    return subprocess.Popen([sys.executable, "-c", code, mark, name], **kw)
child("plain")
child("own-session", start_new_session=True)
child("stubborn", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + sleep)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", sleep, mark, "daemon"])
    os._exit(0)
os.wait()
"""
TREE_SIZE = 4


def wait_until(condition, seconds=20.0, what="condition"):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} not reached in {seconds} s"
        time.sleep(0.02)
    return value


class Marked:
    """The processes that carry a mark in their command line."""

    def __init__(self, directory: Path) -> None:
        self.mark = str(directory / uuid.uuid4().hex)

    def pids(self, also=""):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if self.mark in line and also in line:
                    found.append(int(entry.name))
        return found

    def ready(self):
        directory = Path(self.mark).parent
        return len(list(directory.glob(Path(self.mark).name + ".*"))) == TREE_SIZE

    def tree(self, then="time.sleep(600)"):
        """A command that starts the tree and then does ``then``."""
        return [sys.executable, "-c", TREE + then, self.mark]

    def starter(self, body, then="time.sleep(600)", **kwargs):
        """A process that runs ``body`` with the mark in ``sys.argv[1]`` and the tree's command in ``command``."""
        command = f"command = {self.tree(then)!r}\nimport os, signal, sys, time\n"
        return subprocess.Popen([sys.executable, "-c", command + body, self.mark], **kwargs)

    def wait_ready(self):
        self.wait_until(self.ready, 20.0, "start of all processes")

    def wait_gone(self, seconds=30.0):
        self.wait_until(lambda: not self.pids(), seconds, "end of all processes")

    wait_until = staticmethod(wait_until)


@pytest.fixture
def marked(tmp_path):
    marked = Marked(tmp_path)
    yield marked
    leftover = marked.pids()
    for pid in leftover:
        os.kill(pid, 9)
    assert not leftover, "processes were left"


@pytest.fixture
def bystander(tmp_path):
    """A process that is nobody's business."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        assert process.poll() is None
        process.kill()
