"""Softmax over rows of logits, a block of rows at a time: its statistics, and the gradient of what comes from them.

The statistics of parts of a row combine into those of the row, as in the online softmax (Milakov and Gimelshein 2018,
equation 4), whether the parts are chunks of the vocabulary or lie on different ranks.

Shapes: T tokens (rows of logits), V columns of logits, C rows of a block, K sums per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

# Stands in for the log-probability −inf where it meets a factor exp(−inf) = 0: their product must be 0, not NaN.
_FLOOR = -1e4
# Elements of one fp32 block: about what stays in a CPU's cache, and large kernels on a GPU.
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}


def block_elements(device: torch.device) -> int:
    """Elements of one block that suit the device."""
    return _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What is known of each row from the columns seen so far.

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
    def of_nothing(cls, seen_T: Tensor, dtype: torch.dtype, *, with_entropy: bool) -> Statistics:
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

    def merge(self, other: Statistics) -> Statistics:
        """Of these columns and the other's."""
        top_T = torch.maximum(self.top, other.top)
        sums_KT = self.sums_relative_to(top_T) + other.sums_relative_to(top_T)
        return Statistics(top_T, sums_KT, self.seen | other.seen)

    def reduce(self, group: dist.ProcessGroup) -> Statistics:
        """Of all ranks' columns, each target being on one of them. Two collectives."""
        top_T = self.top.clone()
        dist.all_reduce(top_T, dist.ReduceOp.MAX, group=group)
        sums_KT = self.sums_relative_to(top_T)
        dist.all_reduce(sums_KT, group=group)
        return Statistics(top_T, sums_KT, torch.ones_like(self.seen))

    def results(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs of the targets [T], entropies [T] if their sum is there, logarithms of the whole sums [T]."""
        log_total_T = self.sums[0].log()
        entropy_T = log_total_T - self.sums[2] / self.sums[0] if len(self.sums) == 3 else None
        return self.sums[1] - log_total_T, entropy_T, self.top + log_total_T


Block = tuple[slice, Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class SoftmaxRows:
    """Rows of logits, computed on in fp32 (fp64 if they are), a block at a time.

    Attributes:
        logits: Logits [T, V], of which the first ``columns`` count.
        targets: The target's column [T]; outside 0 to ``columns`` if it is not here.
        columns: Columns that count.
        temperature: The logits (with their bias) are divided by it.
        block_rows: Rows per block.
        bias: Added to each row [columns], or ``None``.
    """

    logits: Tensor
    targets: Tensor
    columns: int
    temperature: float
    block_rows: int
    bias: Tensor | None = None

    def statistics(self, *, with_entropy: bool) -> Statistics:
        """Statistics of these columns."""
        seen_T = (self.targets >= 0) & (self.targets < self.columns)
        result = Statistics.of_nothing(seen_T, accumulation_dtype(self.logits.dtype), with_entropy=with_entropy)
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

        And ∂H / ∂z = −p (log p + H), which costs nothing where no gradient reaches the entropy.

        Args:
            out_TV: Where to write [T, V]; may be the logits themselves. Columns that do not count get 0.
            grad_T: Gradient of the log-probs [T], or ``None``.
            grad_entropy_T: Gradient of the entropies [T], or ``None``.
            lse_T: Logarithm of the sum of exponentials over the whole vocabulary [T].
            entropy_T: Entropies over the whole vocabulary [T]; needed with ``grad_entropy_T``.
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
        """Blocks of rows, ready to compute on. All of them use the same two buffers, or one.

        Args:
            spare: Give a second buffer.

        Yields:
            The rows; their scaled logits, to be overwritten [C, columns]; a second buffer [C, columns], the same
            one without ``spare``; the target's column, any where it is not here [C, 1]; whether it is [C].
        """
        if self.columns == 0:  # nothing but padding
            return
        buffers = self.logits.new_empty(
            1 + spare,
            min(self.block_rows, len(self.logits)),
            self.columns,
            dtype=accumulation_dtype(self.logits.dtype),
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
