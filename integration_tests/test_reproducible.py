"""Runs of one configuration on a busy machine, on a CPU in fp32 and in step: equal to the last bit.

The load is another for each run, so that requests reach the engines, and leave them, in another order.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import LAUNCHER, RUN_SECONDS, Assets, started, train_command, wait_for

from slime_launch.diff import first_parting
from slime_launch.written_run import WrittenRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

ROLLOUTS = 2
PAIRS = 10
# Some of the vocabulary ends a response, so that batches shrink one by one.
FLAGS = ("--n-samples-per-prompt", "4", "--global-batch-size", "16", "--micro-batch-size", "4", "--seed", "7")
LENGTHS = ("--rollout-max-response-len", "24", "--rollout-stop-token-ids", *map(str, range(3, 499, 12)))
_LOADS = itertools.count()
BUSY = """
import random, sys, time
draw = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + draw.uniform(0.01, 0.5)
    while time.monotonic() < end:
        pass
    time.sleep(draw.uniform(0.01, 0.5))
"""


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Processes that each keep a core busy at times of their own, other ones than in any run before."""
    seeds = [str(next(_LOADS)) for _ in range(processes)]
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, seed]) for seed in seeds]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def trained(assets: Assets, work: Path, *, engines: int, busy: int = 2) -> Path:
    """A run under a load of its own, of so many processes; its --output-dir."""
    extra = ("--rollout-num-gpus", str(engines), *FLAGS, *LENGTHS)
    command = train_command(assets, work, *extra, rollouts=ROLLOUTS, save=False, colocate=engines == 1)
    log = work / "log.txt"
    with started(command, log) as process:
        up = "engines, router and trainers are up"
        wait_for(lambda: up in log.read_text(), up, process=process, log=log)
        with load(busy):
            assert process.wait(RUN_SECONDS) == 0, log.read_text()
    return work / "out"


def differ(*directories: Path) -> str | None:
    """Where two runs part, whatever their settings are."""
    rollouts, parting = first_parting(*map(WrittenRun, directories))
    return parting.words if parting else None if rollouts == ROLLOUTS else f"{rollouts} rollouts"


def test_runs_are_equal_whatever_the_load_and_however_many_engines(qwen3: Assets, tmp_path: Path) -> None:
    one, other = (trained(qwen3, tmp_path / str(engines), engines=engines, busy=1) for engines in (1, 2))
    assert differ(one, other) is None


@pytest.mark.full
@pytest.mark.parametrize("engines", [1, 2])
def test_ten_pairs_of_runs_are_equal(qwen3: Assets, tmp_path: Path, engines: int) -> None:
    first, *others = (trained(qwen3, tmp_path / str(number), engines=engines) for number in range(PAIRS + 1))
    assert [differ(first, other) for other in others] == [None] * PAIRS
    done = subprocess.run([LAUNCHER, "diff", first, others[0]], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1].startswith(f"equal: {ROLLOUTS} steps to the last bit"), done.stdout
    assert done.returncode == 0
