"""Log-probs and entropies from logits: whole, or split by vocabulary over a tensor-parallel group.

Softmax is computed on a block of rows at a time. The statistics of parts of a row combine into those of the row, as in
the online softmax (Milakov and Gimelshein 2018, equation 4), whether the parts are chunks of the vocabulary or lie on
different ranks.

Shapes: T tokens (rows of logits), V vocabulary columns of this rank, C rows of a block, K sums per row.
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
from slime_core.ops.tokens import may_look

IGNORED = -100
"""A target that is not looked at, as in ``torch.nn.functional.cross_entropy``: its log-prob is 0, without gradient."""

# A chunk is a part of the logits so small that two buffers of it in fp32 add an eighth to bf16 logits at most, unless
# chunks would be too small to be worth a kernel.
_CHUNKS, _MIN_ELEMENTS = 32, 1 << 16
# Stands in for the log-probability −inf where it meets a factor exp(−inf) = 0: their product must be 0, not NaN.
_FLOOR = -1e4
# Elements of one fp32 block: about what stays in a CPU's cache, and large kernels on a GPU.
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}


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
        targets_T: Token ids [T], whole-vocabulary numbers, the same on all ranks. Where one is −100, as labels have
            it, the log-prob is 0 without gradient.
        temperature: The logits are divided by it.
        group: Tensor-parallel group over which the columns are split; ``None`` if they are all here.
        vocab_size: Ids from here on are padding and take no part. ``None`` means no padding.
        with_entropy: Compute entropies too.
        chunk_size: Rows per chunk; ``None`` chooses by device.
        overwrite_logits: In the backward pass, write the gradient over the logits instead of next to them, which
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
    shard.check(targets_T)
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
    return shard.complete(log_probs_T, targets_T), entropy_T if with_entropy else None


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


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the logits: ids ``first`` to ``first + columns`` of ``vocab_size``, padding left out."""

    first: int
    columns: int
    vocab_size: int

    @classmethod
    def of(cls, columns: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> VocabShard:
        """This rank's shard, of ``columns`` on each rank of the group; ids from ``vocab_size`` on are padding."""
        rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if vocab_size is None:
            vocab_size = columns * world
        if not 1 <= vocab_size <= columns * world:
            raise ConfigError(
                f"vocab_size {vocab_size} must be between 1 and the {columns * world} columns of logits "
                f"({world} ranks × {columns})"
            )
        return cls(rank * columns, min(max(vocab_size - rank * columns, 0), columns), vocab_size)

    def check(self, targets_T: Tensor) -> None:
        """Raise DataError if a target is not in the vocabulary. On a CPU only: elsewhere looking stalls the device."""
        if not may_look(targets_T):
            return
        outside_T = self._outside(targets_T)
        if bool(outside_T.any()):
            first = int(targets_T[outside_T][0])
            raise DataError(f"token id {first} is outside the vocabulary of {self.vocab_size}; check the tokenizer")

    def complete(self, log_probs_T: Tensor, targets_T: Tensor) -> Tensor:
        """The log-probs with 0 for an ignored target, and NaN for one outside the vocabulary; without gradient."""
        filled_T = log_probs_T.masked_fill(targets_T == IGNORED, 0)
        return filled_T.masked_fill(self._outside(targets_T), torch.nan)

    def _outside(self, targets_T: Tensor) -> Tensor:
        return ((targets_T < 0) | (targets_T >= self.vocab_size)) & (targets_T != IGNORED)


def check_temperature(temperature: float) -> None:
    """Raise ConfigError unless it is above 0."""
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature} must be above 0")


def block_elements(device: torch.device) -> int:
    """Elements of one block that suit the device."""
    return _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """Softmax statistics of each row over the columns seen so far.

    Attributes:
        top: The largest logit [T]; finite.
        sums: Relative to it: the sum of exponentials, the target's logit (0 where not seen) and, for the entropy,
            the sum of exponential × logit [2 or 3, T].
        seen: Whether the target was among the columns [T].
    """

    top: Tensor
    sums: Tensor
    seen: Tensor

    @classmethod
    def of_nothing(cls, seen_T: Tensor, dtype: torch.dtype, *, with_entropy: bool) -> RowStatistics:
        """Of no columns at all. ``seen_T`` is taken as it is."""
        top_T = torch.full_like(seen_T, torch.finfo(dtype).min, dtype=dtype)
        return cls(top_T, top_T.new_zeros(3 if with_entropy else 2, len(seen_T)), seen_T)

    def sums_relative_to(self, top_T: Tensor) -> Tensor:
        """The sums relative to another maximum, no smaller than this one."""
        shift_T = self.top - top_T
        scale_T = shift_T.exp()
        sums_KT = self.sums.clone()
        if len(sums_KT) == 3:
            sums_KT[2] = scale_T * (sums_KT[2] + shift_T * sums_KT[0])
        sums_KT[0] *= scale_T
        sums_KT[1] += shift_T.masked_fill(~self.seen, 0)
        return sums_KT

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Of these columns and the other's."""
        top_T = torch.maximum(self.top, other.top)
        sums_KT = self.sums_relative_to(top_T) + other.sums_relative_to(top_T)
        return RowStatistics(top_T, sums_KT, self.seen | other.seen)

    def reduce(self, group: dist.ProcessGroup) -> RowStatistics:
        """Of all ranks' columns, each target being on one of them. Two collectives."""
        top_T = self.top.clone()
        dist.all_reduce(top_T, dist.ReduceOp.MAX, group=group)
        sums_KT = self.sums_relative_to(top_T)
        dist.all_reduce(sums_KT, group=group)
        return RowStatistics(top_T, sums_KT, torch.ones_like(self.seen))

    def results(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs of the targets [T], entropies [T] if their sum is there, logarithms of the whole sums [T]."""
        log_total_T = self.sums[0].log()
        entropy_T = log_total_T - self.sums[2] / self.sums[0] if len(self.sums) == 3 else None
        return self.sums[1] - log_total_T, entropy_T, self.top + log_total_T


Block = tuple[slice, Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class SoftmaxRows:
    """Rows of logits, computed on in fp32 (fp64 if they are), a block of ``block_rows`` at a time.

    Attributes:
        logits: Logits [T, V]; the first ``columns`` count.
        targets: The target's column [T]; outside 0 to ``columns`` if it is not here.
        temperature: The logits, with their bias, are divided by it.
        bias: Added to each row [columns].
    """

    logits: Tensor
    targets: Tensor
    columns: int
    temperature: float
    block_rows: int
    bias: Tensor | None = None

    def statistics(self, *, with_entropy: bool) -> RowStatistics:
        """RowStatistics of these columns."""
        seen_T = (self.targets >= 0) & (self.targets < self.columns)
        result = RowStatistics.of_nothing(seen_T, accumulation_dtype(self.logits.dtype), with_entropy=with_entropy)
        top_T, sums_KT = result.top, result.sums
        for rows, scaled_CV, spare_CV, index_C1, seen_C in self._blocks(spare=with_entropy):
            # A row may be all −inf here; a finite maximum keeps −inf − (−inf) out.
            top_T[rows] = top_C = scaled_CV.amax(-1).clamp_(min=torch.finfo(scaled_CV.dtype).min)
            scaled_CV.sub_(top_C.unsqueeze(1))
            sums_KT[1, rows] = scaled_CV.gather(1, index_C1).squeeze(1).masked_fill_(~seen_C, 0)
            if with_entropy:
                exp_CV = torch.exp(scaled_CV, out=spare_CV)
                sums_KT[0, rows] = exp_CV.sum(-1)
                sums_KT[2, rows] = exp_CV.mul_(scaled_CV.clamp_(min=_FLOOR)).sum(-1)
            else:
                sums_KT[0, rows] = scaled_CV.exp_().sum(-1)
        return result

    def write_gradient(
        self,
        out_TV: Tensor,
        grad_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        lse_T: Tensor,
        entropy_T: Tensor | None,
    ) -> None:
        """The gradient with respect to the logits. With p = softmax(z): ∂ log p_target / ∂z = onehot − p.

        And ∂H / ∂z = −p (log p + H), which costs nothing where no gradient reaches the entropy. ``out_TV`` may be the
        logits themselves; columns that do not count get 0. ``lse_T`` is the logarithm of the sum of exponentials, and
        ``entropy_T`` (needed with ``grad_entropy_T``) the entropy, over the whole vocabulary.
        """
        if grad_T is None:
            grad_T = torch.zeros_like(lse_T)
        blocks = self._blocks(spare=grad_entropy_T is not None)
        for rows, scaled_CV, spare_CV, index_C1, seen_C in blocks:
            log_p_CV = scaled_CV.sub_(lse_T[rows].unsqueeze(1))
            grad_C = grad_T[rows] / self.temperature
            if grad_entropy_T is None or entropy_T is None:
                grad_CV = log_p_CV.exp_().mul_(-grad_C.unsqueeze(1))
            else:
                p_CV = torch.exp(log_p_CV, out=spare_CV)
                factor_C = grad_entropy_T[rows] / self.temperature
                grad_CV = log_p_CV.clamp_(min=_FLOOR).add_(entropy_T[rows].unsqueeze(1)).mul_(factor_C.unsqueeze(1))
                grad_CV.add_(grad_C.unsqueeze(1)).mul_(p_CV.neg_())
            grad_CV.scatter_add_(1, index_C1, grad_C.masked_fill(~seen_C, 0).unsqueeze(1))
            out_TV[rows, : self.columns] = grad_CV
        out_TV[:, self.columns :] = 0

    def _blocks(self, *, spare: bool) -> Iterator[Block]:
        """Blocks of rows, ready to compute on. All of them use the same buffer, or two with ``spare``.

        Yields:
            The rows; their scaled logits, to be overwritten [C, columns]; a second buffer [C, columns], the same
            one without ``spare``; the target's column, any where it is not here [C, 1]; whether it is [C].
        """
        if self.columns == 0:  # nothing but padding
            return
        buffers = self.logits.new_empty(
            1 + spare, min(self.block_rows, len(self.logits)), self.columns, dtype=accumulation_dtype(self.logits.dtype)
        )
        for start in range(0, len(self.logits), self.block_rows):
            rows = slice(start, min(start + self.block_rows, len(self.logits)))
            scaled_CV, spare_CV = buffers[0, : rows.stop - start], buffers[-1, : rows.stop - start]
            scaled_CV.copy_(self.logits[rows, : self.columns])
            if self.bias is not None:
                scaled_CV.add_(self.bias)
            if self.temperature != 1.0:
                scaled_CV.div_(self.temperature)
            target_C = self.targets[rows]
            seen_C = (target_C >= 0) & (target_C < self.columns)
            yield rows, scaled_CV, spare_CV, target_C.clamp(0, self.columns - 1).unsqueeze(1), seen_C
