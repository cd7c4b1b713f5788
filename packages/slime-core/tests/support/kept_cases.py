"""Inputs of `kept_log_probs_and_entropy`, and what one rank or each of two computes of them."""

import torch
import torch.distributed as dist

from slime_core.ops import kept_log_probs_and_entropy

# name: (tokens, hidden size, rows of the weight over both ranks, type)
CASES = {
    "even": (6, 4, 10, torch.float64),
    "bf16": (40, 64, 300, torch.bfloat16),
    "all on one rank": (5, 3, 8, torch.float64),
    "no tokens": (0, 3, 8, torch.float64),
}
TEMPERATURE = 0.7


def inputs(name, seed=0):
    """Hidden states, weight, targets, kept ids and counts; the target is one of the kept ids, at any place."""
    tokens, size, rows, dtype = CASES[name]
    generator = torch.Generator().manual_seed(seed + len(name))
    hidden = torch.randn(tokens, size, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype)
    within = rows // 2 if name == "all on one rank" else rows
    ids, counts, targets = [], [], []
    for _ in range(tokens):
        count = int(torch.randint(1, within + 1, (1,), generator=generator))
        kept = torch.randperm(within, generator=generator)[:count]
        ids.append(kept)
        counts.append(count)
        targets.append(int(kept[int(torch.randint(0, count, (1,), generator=generator))]))
    joined = torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64)
    return hidden, weight, torch.tensor(targets, dtype=torch.int64), joined.int(), torch.tensor(counts).int()


def run(hidden, weight, targets, ids, counts, group=None):
    """Values and gradients under fixed weights of the outputs."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = kept_log_probs_and_entropy(
        hidden, weight, targets, ids, counts, temperature=TEMPERATURE, group=group, with_entropy=True
    )
    upstream = torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)
    (log_probs @ upstream + entropy @ upstream.flip(0)).backward()
    values = {"log_probs": log_probs.detach(), "entropy": entropy.detach()}
    return values | {"hidden": hidden.grad, "weight": weight.grad}


def run_case(name, rank):
    hidden, weight, *rest = inputs(name)
    half = len(weight) // 2
    return run(hidden, weight[rank * half : (rank + 1) * half], *rest, group=dist.group.WORLD)
