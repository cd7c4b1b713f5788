"""Log-probs and entropies from logits: whole, or split by vocabulary over a tensor-parallel group.

Shapes: T tokens (rows of logits), V vocabulary columns of this rank, C rows of a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_core.errors import ConfigError, DataError

# Elements of one fp32 chunk: about what stays in a CPU's cache, and large kernels on a GPU.
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
# Stands in for the log-probability −inf where it meets a factor exp(−inf) = 0: their product must be 0, not NaN.
_FLOOR = -1e4


def log_probs_and_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_size: int | None = None,
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

    Returns:
        Log-probs [T] in nats, and entropies [T] in nats or ``None``; the same on all ranks.

    Raises:
        ConfigError: The temperature is not above 0, or ``chunk_size`` or ``vocab_size`` is below 1.
        DataError: The shapes do not match; on a CPU also a target outside the vocabulary (elsewhere, where looking
            would stall the device, its log-prob is NaN).
    """
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature} must be above 0")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size {chunk_size} must be 1 or more rows")
    if logits_TV.dim() != 2 or targets_T.shape != logits_TV.shape[:1]:
        raise DataError(
            f"logits must be [tokens, vocabulary] and targets [tokens]; got {list(logits_TV.shape)} "
            f"and {list(targets_T.shape)}"
        )
    shard = _Shard.of(logits_TV.shape[1], group, vocab_size)
    valid_T = (targets_T >= 0) & (targets_T < shard.vocab_size)
    if targets_T.device.type == "cpu" and not bool(valid_T.all()):
        first = int(targets_T[~valid_T][0])
        raise DataError(f"token id {first} is outside the vocabulary of {shard.vocab_size}; check the tokenizer")
    if chunk_size is None:
        elements = _CHUNK_ELEMENTS.get(logits_TV.device.type, _CHUNK_ELEMENTS["cuda"])
        chunk_size = max(1, elements // max(logits_TV.shape[1], 1))
    log_probs_T, entropy_T = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T.long() - shard.first, shard.columns, temperature, group, with_entropy, chunk_size
    )
    return log_probs_T.masked_fill(~valid_T, torch.nan), entropy_T if with_entropy else None


@dataclasses.dataclass(frozen=True)
class _Shard:
    """The columns of this rank: ids ``first`` to ``first + columns`` of ``vocab_size``, padding left out."""

    first: int
    columns: int
    vocab_size: int

    @classmethod
    def of(cls, columns: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> _Shard:
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if vocab_size is None:
            vocab_size = columns * world
        if not 1 <= vocab_size <= columns * world:
            raise ConfigError(
                f"vocab_size {vocab_size} must be between 1 and the {columns * world} columns of logits "
                f"({world} ranks × {columns})"
            )
        return cls(rank * columns, min(max(vocab_size - rank * columns, 0), columns), vocab_size)


Chunk = tuple[slice, Tensor, Tensor, Tensor]


def _chunks(logits_TV: Tensor, local_T: Tensor, columns: int, temperature: float, chunk_size: int) -> Iterator[Chunk]:
    """Chunks of rows, ready to compute on.

    Yields:
        The rows; their logits / temperature in a buffer of its own [C, columns]; the target's column, any where it is
        not on this rank [C, 1]; whether it is [C].
    """
    if columns == 0:  # this rank holds padding only
        return
    dtype = _accumulation_dtype(logits_TV)
    for start in range(0, len(logits_TV), chunk_size):
        rows = slice(start, start + chunk_size)
        scaled_CV = logits_TV[rows, :columns].to(dtype, copy=True)
        if temperature != 1.0:
            scaled_CV.div_(temperature)
        local_C = local_T[rows]
        owned_C = (local_C >= 0) & (local_C < columns)
        yield rows, scaled_CV, local_C.clamp(0, columns - 1).unsqueeze(1), owned_C


def _accumulation_dtype(logits_TV: Tensor) -> torch.dtype:
    return torch.float64 if logits_TV.dtype == torch.float64 else torch.float32


class _LogProbs(torch.autograd.Function):
    """Each rank gathers its rows' maximum, exponential sum, target and (for the entropy) exponentially weighted sum.

    Two reductions then combine the ranks, as in the online softmax (Milakov and Gimelshein 2018). With p = softmax(z):
    ∂ log p_target / ∂z = onehot − p, and ∂H / ∂z = −p (log p + H).
    """

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
    ) -> tuple[Tensor, Tensor | None]:
        dtype = _accumulation_dtype(logits_TV)
        lowest = torch.finfo(dtype).min
        top_T = torch.full_like(local_T, lowest, dtype=dtype)
        # K rows: sum of exponentials, target's logit, sum of exponential × logit; all relative to the maximum.
        sums_KT = top_T.new_zeros(3 if with_entropy else 2, len(local_T))
        for rows, scaled_CV, index_C1, owned_C in _chunks(logits_TV, local_T, columns, temperature, chunk_size):
            # A row may be all −inf on this rank; a finite maximum keeps −inf − (−inf) out.
            top_T[rows] = top_C = scaled_CV.amax(-1).clamp_(min=lowest)
            scaled_CV.sub_(top_C.unsqueeze(1))
            sums_KT[1, rows] = scaled_CV.gather(1, index_C1).squeeze(1).masked_fill_(~owned_C, 0)
            if with_entropy:
                exp_CV = scaled_CV.exp()
                sums_KT[0, rows] = exp_CV.sum(-1)
                sums_KT[2, rows] = exp_CV.mul_(scaled_CV.clamp_(min=_FLOOR)).sum(-1)
            else:
                sums_KT[0, rows] = scaled_CV.exp_().sum(-1)
        if group is not None:
            top_T = _combine(top_T, sums_KT, (local_T >= 0) & (local_T < columns), group)
        log_total_T = sums_KT[0].log()
        log_probs_T = sums_KT[1] - log_total_T
        entropy_T = log_total_T - sums_KT[2] / sums_KT[0] if with_entropy else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TV, local_T, top_T + log_total_T, entropy_T)
        ctx.columns, ctx.temperature, ctx.chunk_size = columns, temperature, chunk_size
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TV, local_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_T is None:
            grad_T = torch.zeros_like(lse_T)
        grad_logits_TV = torch.empty_like(logits_TV)
        grad_logits_TV[:, ctx.columns :] = 0  # padding
        chunks = _chunks(logits_TV, local_T, ctx.columns, ctx.temperature, ctx.chunk_size)
        for rows, scaled_CV, index_C1, owned_C in chunks:
            log_p_CV = scaled_CV.sub_(lse_T[rows].unsqueeze(1))
            grad_C = grad_T[rows] / ctx.temperature
            if grad_entropy_T is None:
                grad_CV = log_p_CV.exp_().mul_(-grad_C.unsqueeze(1))
            else:
                p_CV = log_p_CV.exp()
                factor_C = grad_entropy_T[rows] / ctx.temperature
                grad_CV = log_p_CV.clamp_(min=_FLOOR).add_(entropy_T[rows].unsqueeze(1)).mul_(factor_C.unsqueeze(1))
                grad_CV.add_(grad_C.unsqueeze(1)).mul_(p_CV.neg_())
            grad_CV.scatter_add_(1, index_C1, grad_C.masked_fill(~owned_C, 0).unsqueeze(1))
            grad_logits_TV[rows, : ctx.columns] = grad_CV
        return grad_logits_TV, None, None, None, None, None, None


def _combine(top_T: Tensor, sums_KT: Tensor, owned_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Make ``sums_KT`` the whole vocabulary's, in place, and return the whole vocabulary's maximum [T]."""
    global_top_T = top_T.clone()
    dist.all_reduce(global_top_T, dist.ReduceOp.MAX, group=group)
    shift_T = top_T - global_top_T
    scale_T = shift_T.exp()
    if len(sums_KT) == 3:
        sums_KT[2] = scale_T * (sums_KT[2] + shift_T * sums_KT[0])
    sums_KT[0] *= scale_T
    sums_KT[1] += shift_T.masked_fill(~owned_T, 0)
    dist.all_reduce(sums_KT, group=group)
    return global_top_T
