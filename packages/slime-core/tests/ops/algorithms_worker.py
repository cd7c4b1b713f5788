"""One of two gloo ranks with a part of a step's responses each: ``algorithms_worker.py FOLDER RANK``."""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from algorithm_cases import CASES, Part, config_of, make_responses, processed_rewards, step_sizes, whole

LENGTHS = [4, 2, 7, 3, 5, 6, 0, 1, 2]
# Which responses the first rank has. Of trajectories of two samples, each rank has one; or one rank has nothing at all.
SPLITS = ([0, 1, 4, 5, 6], list(range(len(LENGTHS))))


def difference(config, rank, split):
    """The largest difference between this rank's share of the step and the same computed in one piece."""
    responses = make_responses(LENGTHS, seed=0, group_size=3)
    loss, metrics, gradients = whole(config, responses)
    mine = [response for number, response in enumerate(responses) if (number in split) == (rank == 0)]
    part = Part(config, mine, processed_rewards(config, responses), step_sizes(responses), group=dist.group.WORLD)
    mis_sums = part.mis_sums()
    dist.all_reduce(mis_sums)
    own_loss, own_metrics = part.objective(part.advantages(), mis_sums)
    own = part.gradients(own_loss)
    sums = torch.stack([own_loss.detach(), *own_metrics.values()])
    dist.all_reduce(sums)
    found = [(sums - torch.stack([loss.detach(), *metrics.values()])).abs().max()]
    found += [(own[id(response)] - gradients[id(response)]).abs().max() for response in mine if response.mask]
    return torch.stack(found).max().item()


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
    results = {name: max(difference(config_of(name), rank, split) for split in SPLITS) for name in CASES}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
