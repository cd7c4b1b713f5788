"""What each of two gloo ranks with half of the vocabulary computes."""

import torch
import torch.distributed as dist

from slime_core.ops import log_probs_and_entropy
from support.kept_cases import CASES as KEPT_CASES
from support.kept_cases import run_case as run_kept_case
from support.linear_cases import CASES as LINEAR_CASES
from support.linear_cases import count_collectives
from support.linear_cases import run_case as run_linear_case

# name: (columns over both ranks, vocabulary, type)
CASES = {
    "even": (10, 10, torch.float64),
    "padded": (12, 9, torch.float64),
    "empty second shard": (12, 5, torch.float64),
    "bf16": (600, 590, torch.bfloat16),
    "masked shard": (8, 8, torch.float64),
}


def run_case(name, rank):
    columns, vocab_size, dtype = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    logits = (4 * torch.randn(7, columns, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab_size, (7,), generator=generator)
    if name == "masked shard":  # some row has no possible token on the second rank
        logits[3, columns // 2 :], targets[3] = -torch.inf, 1
    upstream = torch.randn(7, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    half = columns // 2
    shard = logits[:, rank * half : (rank + 1) * half].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        shard,
        targets,
        temperature=0.8,
        group=dist.group.WORLD,
        vocab_size=vocab_size,
        with_entropy=True,
        chunk_size=3 - rank,  # ranks need not agree on it
    )
    (log_probs @ upstream + entropy @ upstream.flip(0)).backward()
    return {
        "logits": logits,
        "targets": targets,
        "temperature": 0.8,
        "vocab_size": vocab_size,
        "upstream": upstream,
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "grad": shard.grad,
    }


def run_all(rank):
    with count_collectives():
        return {
            "logits": {name: run_case(name, rank) for name in CASES},
            "kept": {name: run_kept_case(name, rank) for name in KEPT_CASES},
            "linear": {name: run_linear_case(name, rank) for name in LINEAR_CASES},
        }
