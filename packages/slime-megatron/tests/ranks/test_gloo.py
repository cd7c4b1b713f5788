"""Gloo as Megatron needs it, in processes of their own: it is changed for good."""

import json
import subprocess
import sys

import pytest

GROUPS = """
import json, os, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from slime_megatron.ranks.gloo import suit_gloo

if {suited}:
    suit_gloo()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
groups = [dist.new_group([0], timeout=timedelta(seconds=seconds)) for seconds in range(5, 15)]
tensor = torch.ones(3)
for group in groups:
    dist.all_reduce(tensor, group=group)
def loops(wanted):  # a new thread has its name a little later
    threads, end = [], time.monotonic() + 30
    while threads.count("gloo_tcp_loop") != wanted and time.monotonic() < end:
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return threads.count("gloo_tcp_loop")

timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
if (child := os.fork()) == 0:  # no thread of the parent's is there
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=5))
    os._exit(loops(1))
in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([loops({loops}), in_child, timeouts, tensor.tolist()]), flush=True)
os._exit(0)  # at its ordinary end PyTorch's own groups, undestroyed, can end a busy process by std::terminate
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("suited", "loops"), [(False, 11), (True, 1)])
def test_all_groups_of_a_process_have_one_thread_that_watches_the_network(suited, loops):
    code = GROUPS.format(suited=suited, loops=loops)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [loops, 1, [float(seconds) for seconds in range(5, 15)], [1.0, 1.0, 1.0]]
