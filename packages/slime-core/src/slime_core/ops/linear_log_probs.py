"""Log-probs and entropies from hidden states and the output weight, without the logits.

A chunk of the vocabulary at a time: one matrix product gives all tokens' logits for it. That order lets the gradient
of each chunk of the weight be finished by one product over all tokens, so that the weight, the largest thing here,
needs no copy in fp32; what is summed over chunks is the gradient of the hidden states.

Shapes: T tokens, D hidden size, V rows of the weight on this rank, C vocabulary ids of a chunk.
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
from slime_core.ops.log_probs import (
    RowStatistics,
    SoftmaxRows,
    VocabShard,
    accumulation_dtype,
    block_elements,
    check_temperature,
)

# Elements of a chunk beyond which matrix products gain nothing.
_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
# Columns of a chunk: below the first the products are too thin to be asked for, from the second on they run well.
_MIN_COLUMNS, _GOOD_COLUMNS = 64, 1024
_DEFAULT_FLOOR = 16 << 20
# fp32 and int64 numbers per token in use at a time: targets, masks, gradients, statistics of two chunks.
_BYTES_PER_TOKEN = 256


def linear_log_probs_and_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    memory_budget: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``log_probs_and_entropy((hidden @ weightᵀ + bias), targets)`` without ever holding the logits.

    Forward and backward go through the vocabulary in chunks; the backward pass computes the logits again, so a call
    costs four matrix products and keeps one or two numbers per token besides its inputs. Softmax statistics (put
    together as in the online softmax; Milakov and Gimelshein 2018, equation 4) and the sums over chunks are fp32 (fp64
    for fp64 inputs). A matrix product is rounded to the inputs' type once, as everywhere in torch; for logits in fp32,
    give hidden states and weight in fp32. Entropies cost nothing in the backward pass unless a gradient reaches them.

    A group is used twice in the forward pass, and once in the backward pass if the hidden states need a gradient,
    however many chunks there are.

    Args:
        hidden_TD: Hidden states [T, D]; in a group the same on all ranks.
        weight_VD: Output weight [V, D] of the same type. In a group, rank r holds the rows [r·V, (r+1)·V).
        targets_T: Token ids [T], as in :func:`slime_core.ops.log_probs_and_entropy`.
        bias_V: Added to the logits [V], split as the weight is; ``None`` for none.
        temperature: The logits are divided by it.
        group: Tensor-parallel group over which the weight's rows are split; ``None`` if they are all here.
        vocab_size: Ids from here on are padding and take no part. ``None`` means no padding.
        with_entropy: Compute entropies too.
        memory_budget: Bytes that the call may take besides inputs, outputs and gradients, which sets the size of the
            chunks. ``None`` means a tenth of the logits, or a little more where that would make chunks too thin.

    Returns:
        Log-probs [T] in nats, and entropies [T] in nats or ``None``; the same on all ranks. The gradient of the hidden
        states is the whole vocabulary's on all ranks, that of the weight and the bias the rank's own rows'.

    Raises:
        ConfigError: The temperature is not above 0, ``vocab_size`` is out of range, or ``memory_budget`` is too small.
        DataError: Shapes or types do not match; on a CPU also a target outside the vocabulary (elsewhere, where
            looking would stall the device, its log-prob is NaN).
    """
    check_temperature(temperature)
    _check_inputs(hidden_TD, weight_VD, targets_T, bias_V)
    shard = VocabShard.of(len(weight_VD), group, vocab_size)
    shard.check(targets_T)
    plan = ChunkPlan.within(
        memory_budget,
        tokens=len(hidden_TD),
        hidden=hidden_TD.shape[1],
        columns=shard.columns,
        dtype=hidden_TD.dtype,
        device=hidden_TD.device,
    )
    call = _Call(shard.columns, temperature, group, with_entropy, plan)
    log_probs_T, entropy_T = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, bias_V, targets_T.long() - shard.first, call
    )
    return shard.complete(log_probs_T, targets_T), entropy_T if with_entropy else None


def _check_inputs(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, bias_V: Tensor | None) -> None:
    shapes = hidden_TD.dim() == 2 and weight_VD.dim() == 2 and hidden_TD.shape[1] == weight_VD.shape[1]
    if not shapes or targets_T.shape != hidden_TD.shape[:1]:
        raise DataError(
            "hidden states must be [tokens, hidden], the weight [vocabulary, hidden] and targets [tokens]; got "
            f"{list(hidden_TD.shape)}, {list(weight_VD.shape)} and {list(targets_T.shape)}"
        )
    if hidden_TD.dtype != weight_VD.dtype:
        raise DataError(f"hidden states are {hidden_TD.dtype} and the weight {weight_VD.dtype}; cast one of them")
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise DataError(f"the bias must be [{len(weight_VD)}], as the weight's rows; got {list(bias_V.shape)}")


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments besides tensors; ``columns`` are this rank's ids, padding left out."""

    columns: int
    temperature: float
    group: dist.ProcessGroup | None
    with_entropy: bool
    plan: ChunkPlan


Tile = tuple[slice, Tensor, SoftmaxRows]


def _tiles(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, local_T: Tensor, call: _Call) -> Iterator[Tile]:
    """Chunks of the vocabulary: ids; their logits without bias [T, C], in one buffer for all chunks; their softmax."""
    width = min(call.plan.chunk_columns, call.columns)
    buffer = hidden_TD.new_empty(len(hidden_TD) * width)
    for start in range(0, call.columns, width or 1):
        ids = slice(start, min(start + width, call.columns))
        tile_TC = buffer[: len(hidden_TD) * (ids.stop - start)].view(len(hidden_TD), ids.stop - start)
        torch.mm(hidden_TD, weight_VD[ids].t(), out=tile_TC)
        bias_C = None if bias_V is None else bias_V[ids]
        rows = SoftmaxRows(
            tile_TC, local_T - start, ids.stop - start, call.temperature, call.plan.block_rows, bias=bias_C
        )
        yield ids, tile_TC, rows


class _LinearLogProbs(torch.autograd.Function):
    """Online softmax over the chunks, then over the ranks; the backward pass makes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, local_T: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        dtype = accumulation_dtype(hidden_TD.dtype)
        nothing_T = torch.zeros_like(local_T, dtype=torch.bool)
        statistics = RowStatistics.of_nothing(nothing_T, dtype, with_entropy=call.with_entropy)
        for _, _, rows in _tiles(hidden_TD, weight_VD, bias_V, local_T, call):
            statistics = statistics.merge(rows.statistics(with_entropy=call.with_entropy))
        if call.group is not None:
            statistics = statistics.reduce(call.group)
        log_probs_T, entropy_T, lse_T = statistics.results()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, local_T, lse_T, entropy_T)
        ctx.call = call
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, local_T, lse_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_sum = _ProductSum(hidden_TD) if needs_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD) if needs_weight else None
        grad_bias_V = torch.empty_like(bias_V) if needs_bias else None
        for ids, tile_TC, rows in _tiles(hidden_TD, weight_VD, bias_V, local_T, ctx.call):
            rows.write_gradient(tile_TC, grad_T, grad_entropy_T, lse_T, entropy_T)
            if hidden_sum is not None:
                hidden_sum.add(tile_TC, weight_VD[ids])
            if grad_weight_VD is not None:
                torch.mm(tile_TC.t(), hidden_TD, out=grad_weight_VD[ids])
            if grad_bias_V is not None:
                grad_bias_V[ids] = tile_TC.sum(0, dtype=lse_T.dtype)
        for grad in (grad_weight_VD, grad_bias_V):
            if grad is not None:
                grad[ctx.call.columns :] = 0  # padding
        grad_hidden_TD = None if hidden_sum is None else hidden_sum.total(ctx.call.group)
        return grad_hidden_TD, grad_weight_VD, grad_bias_V, None, None


class _ProductSum:
    """A sum of matrix products, kept in fp32 (fp64). The buffer of one product is what the sum is returned in."""

    def __init__(self, like_TD: Tensor) -> None:
        self._sum_TD = torch.zeros_like(like_TD, dtype=accumulation_dtype(like_TD.dtype))
        self._product_TD = None if like_TD.dtype == self._sum_TD.dtype else torch.empty_like(like_TD)

    def add(self, left_TC: Tensor, right_CD: Tensor) -> None:
        if self._product_TD is None:
            self._sum_TD.addmm_(left_TC, right_CD)
        else:
            self._sum_TD.add_(torch.mm(left_TC, right_CD, out=self._product_TD))

    def total(self, group: dist.ProcessGroup | None) -> Tensor:
        """The sum over all ranks of the group, in the type of the factors."""
        if group is not None:
            dist.all_reduce(self._sum_TD, group=group)
        return self._sum_TD if self._product_TD is None else self._product_TD.copy_(self._sum_TD)


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Vocabulary ids per chunk, and rows of a chunk that the softmax handles at a time."""

    chunk_columns: int
    block_rows: int

    @classmethod
    def within(
        cls, budget: int | None, *, tokens: int, hidden: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> ChunkPlan:
        """The largest useful chunks within a budget.

        What counts: a chunk of logits [tokens, chunk_columns] and a copy of the chunk's weight [chunk_columns, hidden]
        in ``dtype`` (libraries of matrix products pack such a copy for themselves); two buffers of the softmax in fp32
        (a quarter of what is left for both); and, where a gradient reaches 16-bit hidden states, its sum in fp32.
        Unset, the budget is a tenth of the logits, which leaves libraries something of their own below an eighth; at
        least 16 MiB and what 1,024 columns need.

        Raises:
            ConfigError: Not even 64 columns fit.
        """
        wide = accumulation_dtype(dtype).itemsize
        fixed = tokens * _BYTES_PER_TOKEN
        # With and without a gradient the same chunks, so that both give the same log-probs to the last bit.
        if wide != dtype.itemsize:
            fixed += tokens * hidden * wide
        column_bytes = (max(tokens, 1) + hidden) * dtype.itemsize

        def needed(at_least: int) -> int:
            width = min(at_least, columns)
            return fixed + width * max(column_bytes * 4 // 3 + 1, 4 * 2 * wide)

        if budget is None:
            budget = max(columns * tokens * dtype.itemsize // 10, needed(_GOOD_COLUMNS), _DEFAULT_FLOOR)
        if budget < needed(_MIN_COLUMNS):
            raise ConfigError(
                f"memory_budget {budget} bytes is below the {needed(_MIN_COLUMNS)} that {tokens} tokens of hidden size "
                f"{hidden} need; raise it, or give fewer tokens at a time"
            )
        free = budget - fixed
        elements = min(block_elements(device), free // 4 // (2 * wide))
        cap = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS["cuda"]) // max(tokens, 1)
        chunk_columns = min(columns, elements, max(cap, _GOOD_COLUMNS), (free - elements * 2 * wide) // column_bytes)
        return cls(chunk_columns, max(1, elements // max(chunk_columns, 1)))
