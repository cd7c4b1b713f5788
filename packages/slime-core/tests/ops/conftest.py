import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("vocab_parallel_worker.py")


@pytest.fixture(scope="session")
def vocab_parallel_ranks(tmp_path_factory):
    """What two gloo processes computed, each with half of the vocabulary: of each rank, by "logits" or "linear"."""
    folder = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, str(WORKER), str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
