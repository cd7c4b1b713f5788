"""One of two gloo ranks with a part of the tokens each: ``whitening_worker.py FOLDER RANK``."""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from slime_core.errors import DataError
from slime_core.ops import AdvantageInputs, Discounted, compute_advantages, whiten

# name: (tokens of each rank, share of them that is masked, what is added to all)
CASES = {
    "uneven": ((13, 4), 0.3, 0.0),
    "empty rank": ((9, 0), 0.0, 0.0),
    "both empty": ((0, 0), 0.0, 0.0),
    "all masked on one": ((6, 5), None, 0.0),
    "one token": ((1, 0), 0.0, 0.0),
    "far from zero": ((50, 70), 0.2, 1e6),
}


def tokens(name):
    """All ranks' values, NaN where masked, and masks."""
    counts, masked, offset = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    values = torch.randn(sum(counts), generator=generator, dtype=torch.float64) + offset
    mask = torch.ones(sum(counts)) if masked is None else torch.rand(sum(counts), generator=generator) >= masked
    if masked is None:
        mask[counts[0] :] = 0
    return values.masked_fill(mask == 0, torch.nan), mask, counts


def run_case(name, rank):
    values, mask, counts = tokens(name)
    return whiten(values.split(counts)[rank], mask.split(counts)[rank], group=dist.group.WORLD)


def run_estimator(rank):
    """Three responses: two on the first rank, one on the second, or all on the second."""
    rewards, mask, lengths = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1, 1, 0, 1, 1, 0.0]), [2, 1, 3]
    results = []
    for cut in (2, 0):
        mine = slice(0, cut) if rank == 0 else slice(cut, 3)
        start = sum(lengths[: mine.start])
        inputs = AdvantageInputs(
            rewards_N=rewards[mine],
            mask_T=mask[start : start + sum(lengths[mine])],
            lengths_N=torch.tensor(lengths[mine], dtype=torch.int64),
        )
        result = compute_advantages(inputs, Discounted(0.9), whitened=True, group=dist.group.WORLD)
        results.append(result.advantages_T)
    return results


def refusal(rank):
    """A NaN on the second rank is an error on both."""
    try:
        whiten(torch.tensor([1.0, 2.0 if rank == 0 else torch.nan]), torch.ones(2), group=dist.group.WORLD)
    except DataError as error:
        return str(error)
    return None


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
    results = {name: run_case(name, rank) for name in CASES}
    torch.save({**results, "estimator": run_estimator(rank), "refusal": refusal(rank)}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
