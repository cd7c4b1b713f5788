import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules beside the tests


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Runs ``NAME.py FOLDER RANK`` of this folder as two gloo processes; gives what each wrote to ``rank<N>.pt``."""

    def run(name):
        worker, folder = Path(__file__).with_name(f"{name}.py"), tmp_path_factory.mktemp("gloo")
        command = [sys.executable, str(worker), str(folder)]
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

    return run


@pytest.fixture(scope="session")
def vocab_parallel_ranks(two_ranks):
    """What two ranks computed, each with half of the vocabulary: of each rank, by "logits" or "linear"."""
    return two_ranks("vocab_parallel_worker")
