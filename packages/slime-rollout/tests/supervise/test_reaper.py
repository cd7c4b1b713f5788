"""What a supervisor removes, and which processes it finds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime_rollout.supervise import Supervised, reaper

GRACE = 1.0


def test_torch_memory_of_the_tree_is_removed_and_nobody_elses():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as bystander:
        others = Path(f"/dev/shm/torch_{bystander.pid}_test_0")
        others.touch()
        try:
            with Supervised.start([sys.executable, "-c", code], grace=GRACE) as supervised:
                deadline = time.monotonic() + 20
                while not (tree := reaper.descendants(supervised.pid)):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                own = Path(f"/dev/shm/torch_{tree[0].pid}_test_0")
                own.touch()
                supervised.stop()
            assert (own.exists(), others.exists()) == (False, True)
        finally:
            bystander.kill()
            others.unlink()


# Shares memory as torch does, says who it is, and ends its first thread: the kernel calls it a zombie from then on.
FIRST_THREAD_ENDS = """
import ctypes, os, pathlib, sys, threading, time
def go_on():
    while " Z " not in pathlib.Path("/proc/self/stat").read_text():
        time.sleep(0.01)
    pathlib.Path(f"/dev/shm/torch_{os.getpid()}_test_0").touch()
    os.rename(sys.argv[1], sys.argv[2])
    time.sleep(60)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_is_no_zombie(marked, tmp_path):
    paths = [str(tmp_path / name) for name in ("writing", "pid")]
    start = f"import subprocess, sys, time; subprocess.Popen({[sys.executable, '-c', FIRST_THREAD_ENDS, *paths]!r})"
    with Supervised.start([sys.executable, "-c", start + "; time.sleep(60)"], grace=GRACE) as supervised:
        marked.wait_until(Path(paths[1]).exists)
        pid = int(Path(paths[1]).read_text())
        memory = Path(f"/dev/shm/torch_{pid}_test_0")
        try:
            assert pid in [process.pid for process in reaper.descendants(supervised.pid)]
            supervised.stop()
            assert not Path(f"/proc/{pid}").exists()
            assert not memory.exists()
        finally:
            memory.unlink(missing_ok=True)
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def test_torch_memory_of_a_process_that_nobody_has_reaped_is_removed():
    with subprocess.Popen(["true"]) as zombie:
        memory = Path(f"/dev/shm/torch_{zombie.pid}_test_0")
        memory.touch()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        try:
            reaper.remove_torch_memory({zombie.pid})
            assert not memory.exists()
        finally:
            memory.unlink(missing_ok=True)
