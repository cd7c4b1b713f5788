"""Shared by the functions on tokens: clean and wide inputs, sums over sequences, exponentials that stay finite.

T tokens of N sequences that lie one after the other, without padding between them. Under context parallelism each rank
of a group has some tokens of the same N sequences, in the same order of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.errors import ConfigError, DataError

Lengths = Sequence[int] | Tensor | int
"""Tokens of each of N sequences, T in all; 0 is allowed. One number if all have as many: rows [N, L], flattened."""

LIMIT = 20.0
"""Largest exponent taken exactly (a ratio of 4.9e8)."""

_TAME = 1e4


def widen(values: Tensor) -> Tensor:
    """The values in fp32 where they came in less (bf16: a clip range of 2e-4 is lost in it). fp64 stays. Any shape."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked(mask_T: Tensor | None, **values_T: Tensor) -> list[Tensor]:
    """The values, widened, and 0 where the mask is 0, whatever stood there, NaN too. No gradient goes to such places.

    A weight of 0 on the loss is not enough for that: 0 × NaN is NaN, in the value and in the gradient. The mask may be
    token weights; ``None`` keeps all. Raises DataError if the shapes differ.
    """
    check_shapes(**values_T, **({} if mask_T is None else {"mask_T": mask_T}))
    wide_T = [widen(tensor) for tensor in values_T.values()]
    return wide_T if mask_T is None else [tensor.masked_fill(mask_T == 0, 0) for tensor in wide_T]


def weighable(weights_T: Tensor, **values_T: Tensor) -> list[Tensor]:
    """The values, widened, such that value × weight is 0 wherever the weight is 0: :func:`masked`, if it is needed.

    Filling in is slow on a CPU, and one look at the extremes shows whether any value is so large that it matters.
    """
    check_shapes(**values_T, weights_T=weights_T)
    if may_look(weights_T) and weights_T.numel():
        extremes = [extreme for tensor in values_T.values() for extreme in torch.aminmax(tensor.detach())]
        if all(abs(float(extreme)) < _TAME for extreme in extremes):
            return [widen(tensor) for tensor in values_T.values()]
    return masked(weights_T, **values_T)


def may_look(tensor: Tensor) -> bool:
    """Whether looking at its values costs nothing. It would stall a GPU, and a compiler has no values."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_shapes(**values_T: Tensor) -> None:
    """Raise DataError unless all have one shape."""
    if len({tensor.shape for tensor in values_T.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in values_T.items())
        raise DataError(f"these must have one shape, one number per token each: {shapes}")


def needed(value: Tensor | None, who: str, what: str) -> Tensor:
    """The tensor, which ``who`` (a flag) needs. Raises ConfigError if it is ``None``."""
    if value is None:
        raise ConfigError(f"{who} needs {what}, and none were given")
    return value


def needed_lengths(lengths: Lengths | None, who: str) -> Lengths:
    """The lengths, likewise."""
    if lengths is None:
        raise ConfigError(f"{who} needs the lengths of the responses, and none were given")
    return lengths


def bounded_exp(x: Tensor) -> Tensor:
    """``exp(x)``, above ``LIMIT`` its tangent there: finite, monotone, and with a gradient.

    A plain ``exp`` overflows in fp32 at 88, and its infinity becomes NaN as soon as a mask or the unused side of a clip
    multiplies it by 0. Cutting the exponent would lose the gradient's direction where it matters most.
    """
    return x.clamp(max=LIMIT).exp() + math.exp(LIMIT) * torch.relu(x - LIMIT)


def bounded_expm1_minus(x: Tensor) -> Tensor:
    """``exp(x) - 1 - x`` (never negative, accurate near 0), above ``LIMIT`` its tangent there."""
    inner = x.clamp(max=LIMIT)
    return inner.expm1() - inner + math.expm1(LIMIT) * torch.relu(x - LIMIT)


def lengths_tensor(lengths: Sequence[int] | Tensor, total: int, device: torch.device | str | None = None) -> Tensor:
    """The lengths as int64 [N].

    Raises:
        DataError: A length is negative or not a whole number, or they do not add up to ``total``.
    """
    given_N = torch.as_tensor(lengths)
    lengths_N = given_N.to(torch.int64)
    if lengths_N.dim() != 1 or bool((lengths_N < 0).any()) or bool((lengths_N != given_N).any()):
        raise DataError(f"lengths must be whole numbers of 0 or more, one per sequence; got {given_N.tolist()}")
    if int(lengths_N.sum()) != total:
        raise DataError(f"lengths add up to {int(lengths_N.sum())} but there are {total} tokens")
    return lengths_N.to(device)


def sequence_lengths(lengths: Lengths, values_T: Tensor) -> Tensor | int:
    """The lengths checked against the tokens, on their device; a single number stays one."""
    if not isinstance(lengths, int):
        return lengths_tensor(lengths, len(values_T), values_T.device)
    if lengths < 1 or len(values_T) % lengths:
        raise DataError(f"{len(values_T)} tokens are not rows of {lengths}")
    return lengths


def sequence_sum(values_T: Tensor, lengths_N: Tensor | int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over each sequence [N]; 0 for an empty one. Differentiable.

    Args:
        values_T: Floating-point numbers [T].
        lengths_N: From :func:`sequence_lengths`.
        group: Ranks that hold the sequences' other tokens; each of them must call this. ``None`` if these are whole.
    """
    if isinstance(lengths_N, int):
        sums_N = values_T.view(-1, lengths_N).sum(1)
    else:
        sums_N = _RaggedSum.apply(values_T, lengths_N)  # type: ignore[no-untyped-call]
    return sums_N if group is None else _SumOverRanks.apply(sums_N, group)  # type: ignore[no-untyped-call]


def sequence_mean(
    values_T: Tensor, weights_T: Tensor, lengths_N: Tensor | int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Mean of each sequence under its tokens' weights, such as a mask [N]; 0 where all are 0. Differentiable."""
    return weighted_sequences(values_T, weights_T, lengths_N, group)[0]


def weighted_sequences(
    values_T: Tensor, weights_T: Tensor, lengths_N: Tensor | int, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`sequence_mean`, and the sum of the weights that are here [N]. Where a weight is 0, values may be anything.

    The other arguments are those of :func:`sequence_sum`.
    """
    weights_T = weights_T.to(values_T.dtype)
    look = may_look(values_T)
    if not look:
        (values_T,) = masked(weights_T, values_T=values_T)
    sums_N = sequence_sum(values_T * weights_T, lengths_N, group)
    if look and not math.isfinite(float(sums_N.detach().sum())):
        (values_T,) = masked(weights_T, values_T=values_T)
        sums_N = sequence_sum(values_T * weights_T, lengths_N, group)
    weights_N = sequence_sum(weights_T, lengths_N)
    total_N = weights_N if group is None else _SumOverRanks.apply(weights_N, group)  # type: ignore[no-untyped-call]
    return sums_N / total_N.where(total_N != 0, 1), weights_N


def expand(values_N: Tensor, lengths_N: Tensor | int) -> Tensor:
    """Each sequence's number at each of its tokens [T]. Differentiable."""
    if isinstance(lengths_N, int):
        return values_N.unsqueeze(1).expand(-1, lengths_N).reshape(-1)
    return _RaggedExpand.apply(values_N, lengths_N)  # type: ignore[no-untyped-call,no-any-return]


def scaled(values_T: Tensor, factors_N: Tensor, lengths_N: Tensor | int) -> Tensor:
    """The values times their sequence's factor [T]."""
    if isinstance(lengths_N, int):
        return (values_T.view(-1, lengths_N) * factors_N.unsqueeze(1)).view(-1)
    return values_T * expand(factors_N, lengths_N)


def total(values_X: Tensor, weights_X: Tensor) -> Tensor:
    """``Σ weights · values`` without gradient, as metrics need it: in one pass where the types are the same."""
    if values_X.dtype == weights_X.dtype:
        return torch.dot(values_X.detach(), weights_X.detach())
    return (values_X.detach() * weights_X.detach()).sum()


class _RaggedSum(torch.autograd.Function):
    """A sum over each sequence. Each is the other's backward pass, which is quicker than torch's own ones."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, lengths_N: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_N)
        return torch.segment_reduce(values_T, "sum", lengths=lengths_N, axis=0, unsafe=True, initial=0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return grad_N.repeat_interleave(*ctx.saved_tensors), None


class _RaggedExpand(torch.autograd.Function):
    """Each sequence's number at each of its tokens."""

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, lengths_N: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_N)
        return values_N.repeat_interleave(lengths_N)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        (lengths_N,) = ctx.saved_tensors
        grad_T = grad_T.contiguous()
        return torch.segment_reduce(grad_T, "sum", lengths=lengths_N, axis=0, unsafe=True, initial=0), None


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' numbers, on each of them. Every rank's loss depends on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total_N = values_N.clone()
        dist.all_reduce(total_N, group=group)
        return total_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        total_N = grad_N.contiguous().clone()
        dist.all_reduce(total_N, group=ctx.group)
        return total_N, None
