"""One of two gloo ranks with a part of the step each: ``statistics_worker.py FOLDER RANK``."""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from slime_core.ops.diagnostics import drift_statistics


def main():
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    steps = torch.load(folder / "parts.pt")
    reduced = [drift_statistics(**parts[rank]).reduced().metrics() for parts in steps]
    torch.save(reduced, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
