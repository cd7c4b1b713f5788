"""Log-probs and entropies from logits: whole, or split by vocabulary over a tensor-parallel group.

Shapes: T tokens (rows of logits), V vocabulary columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_core.errors import ConfigError, DataError
from slime_core.ops.softmax_rows import SoftmaxRows, block_elements
from slime_core.ops.vocab_shard import VocabShard, check_temperature

# A chunk is a part of the logits so small that two buffers of it in fp32 add an eighth to bf16 logits at most, unless
# chunks would be too small to be worth a kernel.
_CHUNKS, _MIN_ELEMENTS = 32, 1 << 16


def log_probs_and_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_size: int | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(logits / temperature)`` at the targets, and the entropy of each row's whole distribution.

    Computed in fp32 (fp64 for fp64 logits), a chunk of rows at a time. The backward pass recomputes the softmax: what
    is kept for it is the logits as they came and one or two numbers per row. Entropies cost nothing in the backward
    pass unless a gradient reaches them. A group is used twice per call, however many chunks there are, and not at all
    in the backward pass.

    Args:
        logits_TV: Logits [T, V]. In a group, rank r holds the columns [r·V, (r+1)·V).
        targets_T: Token ids [T], whole-vocabulary numbers, the same on all ranks.
        temperature: The logits are divided by it.
        group: Tensor-parallel group over which the columns are split; ``None`` if they are all here.
        vocab_size: Ids from here on are padding and take no part. ``None`` means no padding.
        with_entropy: Compute entropies too.
        chunk_size: Rows per chunk; ``None`` chooses by device.
        overwrite_logits: In the backward pass, write the gradient over the logits instead of beside them, which
            halves the peak. They must be the result of an operation that does not need them, such as a matrix product,
            and nobody may look at them afterwards; autograd refuses another backward pass through them.

    Returns:
        Log-probs [T] in nats, and entropies [T] in nats or ``None``; the same on all ranks.

    Raises:
        ConfigError: The temperature is not above 0, or ``chunk_size`` or ``vocab_size`` is below 1.
        DataError: The shapes do not match; ``overwrite_logits`` for a tensor that no operation made; on a CPU also a
            target outside the vocabulary (elsewhere, where looking would stall the device, its log-prob is NaN).
    """
    check_temperature(temperature)
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size {chunk_size} must be 1 or more rows")
    if logits_TV.dim() != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise DataError(
            f"logits must be [tokens, vocabulary] and targets [tokens]; got {list(logits_TV.shape)} "
            f"and {list(targets_T.shape)}"
        )
    if overwrite_logits and logits_TV.requires_grad and logits_TV.is_leaf:
        raise DataError(
            "overwrite_logits would write the gradient of a leaf tensor over its values; leave it out, or hand over "
            "the logits that a model computed"
        )
    shard = VocabShard.of(logits_TV.shape[1], group, vocab_size)
    valid_T = shard.valid(targets_T)
    if chunk_size is None:
        elements = min(block_elements(logits_TV.device), max(logits_TV.numel() // _CHUNKS, _MIN_ELEMENTS))
        chunk_size = max(1, elements // max(logits_TV.shape[1], 1))
    log_probs_T, entropy_T = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits_TV,
        targets_T.long() - shard.first,
        shard.columns,
        temperature,
        group,
        with_entropy,
        chunk_size,
        overwrite_logits,
    )
    return log_probs_T.masked_fill(~valid_T, torch.nan), entropy_T if with_entropy else None


class _LogProbs(torch.autograd.Function):
    """Each rank's statistics of its columns, combined; the backward pass computes the softmax again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        local_T: Tensor,
        columns: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        chunk_size: int,
        overwrite_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows = SoftmaxRows(logits_TV, local_T, columns, temperature, chunk_size)
        statistics = rows.statistics(with_entropy=with_entropy)
        if group is not None:
            statistics = statistics.reduce(group)
        log_probs_T, entropy_T, lse_T = statistics.results()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TV, local_T, lse_T, entropy_T)
        ctx.columns, ctx.temperature, ctx.chunk_size = columns, temperature, chunk_size
        ctx.overwrite_logits = overwrite_logits
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TV, local_T, lse_T, entropy_T = ctx.saved_tensors
        # Detached, it still counts as a change to the logits, so that autograd notices a second use of them.
        grad_logits_TV = logits_TV.detach() if ctx.overwrite_logits else torch.empty_like(logits_TV)
        rows = SoftmaxRows(logits_TV, local_T, ctx.columns, ctx.temperature, ctx.chunk_size)
        rows.write_gradient(grad_logits_TV, grad_T, grad_entropy_T, lse_T, entropy_T)
        return grad_logits_TV, None, None, None, None, None, None, None
