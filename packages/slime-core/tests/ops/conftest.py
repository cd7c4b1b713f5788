import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"
SECONDS = 90


class TwoRanks:
    """Two processes joined by gloo. Started by the first call, since most runs select no test that needs them."""

    def __init__(self, make_folder):
        self.make_folder = make_folder
        self.processes, self.pipes = [], []

    def __call__(self, module, name, *arguments):
        """What the function of that name, in the module (a file of `support`), returns of ``(rank, *arguments)``."""
        if not self.processes:
            self.start()
        job = pickle.dumps((str(SUPPORT / module), name, arguments))
        end = time.monotonic() + SECONDS
        outcomes = []
        try:
            for pipe in self.pipes:
                pipe.send_bytes(job)
            for rank, pipe in enumerate(self.pipes):
                assert pipe.poll(max(end - time.monotonic(), 0)), f"rank {rank} gave nothing in {SECONDS} seconds"
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            broken = [f"rank {rank}: {result}" for rank, (good, result) in enumerate(outcomes) if not good]
            assert not broken, "\n".join(broken)
        except BaseException:
            self.stop()  # the ranks may be out of step now
            raise
        return [result for _, result in outcomes]

    def start(self):
        folder, places = self.make_folder(), [str(TESTS), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        for rank in range(2):
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, SUPPORT / "gloo_rank.py", str(rank), str(theirs.fileno()), folder]
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            self.pipes.append(ours)
            theirs.close()

    def stop(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes, self.pipes = [], []


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Call a function on two gloo ranks: see :class:`TwoRanks`."""
    ranks = TwoRanks(lambda: tmp_path_factory.mktemp("gloo"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def vocab_parallel_ranks(two_ranks):
    """What two ranks computed, each with half of the vocabulary: of each rank, by "logits" or "linear"."""
    return two_ranks("vocab_parallel_cases.py", "run_all")


@pytest.fixture
def peak_bytes():
    """The most memory that torch held at a time while running something, above what it held before."""

    def peak_bytes(run):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).cumsum(0)
        return int(held.max())

    return peak_bytes
