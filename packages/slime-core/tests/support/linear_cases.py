"""What ``vocab_parallel_cases.py`` computes from hidden states, each rank with half of the weight's rows."""

import contextlib

import torch
import torch.distributed as dist

from slime_core.ops import linear_log_probs_and_entropy

TOKENS, HIDDEN = 7, 5
# name: (rows of the weight over both ranks, vocabulary, type, budgets in bytes per rank)
CASES = {
    "even": (400, 400, torch.float64, (None, None)),
    "chunks": (400, 400, torch.float64, (14_000, 11_000)),  # ranks need not agree on them
    "padded": (400, 390, torch.float64, (11_000, 11_000)),
    "empty second shard": (400, 150, torch.float64, (11_000, 11_000)),
    "bf16": (600, 590, torch.bfloat16, (None, None)),
}


def inputs(name):
    """Hidden states, weight, bias, targets and the two upstream gradients, the same on all ranks."""
    columns, vocab_size, dtype, _ = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((TOKENS, HIDDEN), (columns, HIDDEN), (columns,))
    )
    targets = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    upstream = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64).to(wide)
    return hidden, weight, bias, targets, upstream


def run(hidden, weight, bias, targets, upstream, **kwargs):
    """Forward and backward: log-probs, entropies and the three gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    log_probs, entropy = linear_log_probs_and_entropy(
        *leaves[:2], targets, bias_V=leaves[2], temperature=0.8, with_entropy=True, **kwargs
    )
    forward_calls = list(CALLS)
    (log_probs @ upstream[0] + entropy @ upstream[1]).backward()
    named = dict(zip(("hidden", "weight", "bias"), (leaf.grad for leaf in leaves), strict=True))
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), **named, "forward_calls": len(forward_calls)}


CALLS = []


def run_case(name, rank):
    columns, vocab_size, _, budgets = CASES[name]
    hidden, weight, bias, targets, upstream = inputs(name)
    own = slice(rank * columns // 2, (rank + 1) * columns // 2)
    CALLS.clear()
    result = run(
        hidden,
        weight[own],
        bias[own],
        targets,
        upstream,
        group=dist.group.WORLD,
        vocab_size=vocab_size,
        memory_budget=budgets[rank],
    )
    return result | {"calls": len(CALLS)}


@contextlib.contextmanager
def count_collectives():
    """Make every all-reduce leave a note in CALLS."""
    plain = dist.all_reduce

    def counted(*args, **kwargs):
        CALLS.append(args)
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    try:
        yield
    finally:
        dist.all_reduce = plain
