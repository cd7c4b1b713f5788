"""The process that commands are forked from."""

import subprocess
from pathlib import Path

from slime_rollout.supervise import reaper


def test_the_process_ends_with_the_one_that_started_it(marked):
    body = "from slime_rollout.supervise.forked import template\n"
    body += "with template(sys.executable, 'import time; time.sleep(600)', os.environ):\n"
    body += "    print(os.getpid(), flush=True); time.sleep(600)"
    with marked.starter(body, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout.readline()
        (pid,) = marked.wait_until(lambda: reaper.descendants(starter.pid))
        marked.wait_until(lambda: "forking.py" in Path(f"/proc/{pid.pid}/cmdline").read_text())
        starter.kill()
        marked.wait_until(lambda: not reaper.is_alive(pid.pid), what="end of the process")
