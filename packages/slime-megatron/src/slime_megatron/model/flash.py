"""Variable-length flash attention on CUDA, as PyTorch has it; several calls are merged into one attention.

A call gives its output and the logarithm of the sum of exponentiated scores (LSE). With the merged output and LSE, the
gradients of each call are right on their own (Liu et al., 2023, "Ring Attention").

The kernel has not been run: there was no GPU. The merging is tested with another kernel.

Notation: T queries, U keys, R and C those of a call, H query heads, J key/value heads, E channels of queries and keys,
    F of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class FlashCall:
    """A call in which the queries of a run attend to the keys of the same run.

    Attributes:
        query_rows_R: Which tokens the queries are, run after run; ``None`` for all of them in order.
        key_rows_C: Likewise.
        query_ends: 0 and where each run's queries end, int32.
        key_ends: Likewise.
        most_queries: Of a run.
        most_keys: Of a run.
        causal: Whether query q of a run sees its first q + 1 keys only.
    """

    query_rows_R: torch.Tensor | None
    key_rows_C: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int
    causal: bool


def flash_call(
    queries: NDArray[np.int64],
    keys: NDArray[np.int64],
    query_rows_R: NDArray[np.int64] | None,
    key_rows_C: NDArray[np.int64] | None,
    *,
    causal: bool,
    device: torch.device | None,
) -> FlashCall:
    """The call with so many queries and keys in each run."""

    def moved(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    query_ends, key_ends = (
        moved(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)) for lengths in (queries, keys)
    )
    return FlashCall(
        query_rows_R=None if query_rows_R is None else moved(query_rows_R),
        key_rows_C=None if key_rows_C is None else moved(key_rows_C),
        query_ends=query_ends,
        key_ends=key_ends,
        most_queries=int(queries.max()),
        most_keys=int(keys.max()),
        causal=causal,
    )


class TorchFlash:
    """FlashAttention 2 (Dao, 2023) in PyTorch's CUDA builds, for bfloat16 and float16.

    It computes one call, of as many queries and keys as it has rows.
    """

    def forward(
        self, query_RHE: torch.Tensor, key_CJE: torch.Tensor, value_CJF: torch.Tensor, call: FlashCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, R × H × F, and the LSE, H × R in fp32."""
        width = _width(query_RHE, value_CJF)
        given = (_widened(tensor, width) for tensor in (query_RHE, key_CJE, value_CJF))
        ends = call.query_ends, call.key_ends, call.most_queries, call.most_keys
        output, lse_HR, *_ = torch.ops.aten._flash_attention_forward(
            *given, *ends, 0.0, call.causal, False, scale=scale
        )
        return output[..., : value_CJF.shape[-1]], lse_HR

    def backward(
        self,
        grad_RHF: torch.Tensor,
        query_RHE: torch.Tensor,
        key_CJE: torch.Tensor,
        value_CJF: torch.Tensor,
        output_RHF: torch.Tensor,
        lse_HR: torch.Tensor,
        call: FlashCall,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of queries, keys and values; output and LSE are over all calls."""
        width = _width(query_RHE, value_CJF)
        given = (_widened(tensor, width) for tensor in (grad_RHF, query_RHE, key_CJE, value_CJF, output_RHF))
        ends = call.query_ends, call.key_ends, call.most_queries, call.most_keys
        # Random state of the dropout, which there is none of.
        state, offset = torch.zeros(2, dtype=torch.uint64, device=grad_RHF.device), grad_RHF.new_empty(0)
        query, key, value = torch.ops.aten._flash_attention_backward(
            *given, lse_HR.contiguous(), *ends, 0.0, call.causal, state, offset, scale=scale
        )
        channels = query_RHE.shape[-1]
        return query[..., :channels], key[..., :channels], value[..., : value_CJF.shape[-1]]


def _width(query_RHE: torch.Tensor, value_CJF: torch.Tensor) -> int:
    """Channels that the kernel computes with: equally many of queries and values, a multiple of 8."""
    return -(-max(query_RHE.shape[-1], value_CJF.shape[-1]) // 8) * 8


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])).contiguous()


class FlashAttention(torch.autograd.Function):
    """Attention of T × H × E queries to U × J × E keys by one or more calls."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THE: torch.Tensor,
        key_UJE: torch.Tensor,
        value_UJF: torch.Tensor,
        calls: Sequence[FlashCall],
        scale: float,
        kernel: TorchFlash,
    ) -> torch.Tensor:
        """The output, T × H × F. The first call has all queries."""
        output_THF, lse_HT = kernel.forward(query_THE, *_keys(calls[0], key_UJE, value_UJF), calls[0], scale)
        for call in calls[1:]:
            rows = call.query_rows_R
            other_RHF, other_HR = kernel.forward(query_THE[rows], *_keys(call, key_UJE, value_UJF), call, scale)
            both_HR = torch.logaddexp(lse_HT[:, rows], other_HR)
            own_RH1, other_RH1 = ((lse - both_HR).exp().t()[..., None] for lse in (lse_HT[:, rows], other_HR))
            output_THF[rows] = (output_THF[rows] * own_RH1 + other_RHF * other_RH1).to(output_THF.dtype)
            lse_HT[:, rows] = both_HR
        ctx.save_for_backward(query_THE, key_UJE, value_UJF, output_THF, lse_HT)
        ctx.calls, ctx.scale, ctx.kernel = calls, scale, kernel
        return output_THF

    @staticmethod
    def backward(ctx: Any, grad_THF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        query_THE, key_UJE, value_UJF, output_THF, lse_HT = ctx.saved_tensors
        # In fp32 (fp64): a prompt's gradients are sums over its group.
        exact = lse_HT.dtype
        grads = [torch.zeros_like(tensor, dtype=exact) for tensor in (query_THE, key_UJE, value_UJF)]
        for call in ctx.calls:
            picked = (_picked(tensor, call.query_rows_R) for tensor in (grad_THF, query_THE))
            output_RHF, lse_RH = (_picked(tensor, call.query_rows_R) for tensor in (output_THF, lse_HT.t()))
            keys = _keys(call, key_UJE, value_UJF)
            parts = ctx.kernel.backward(*picked, *keys, output_RHF, lse_RH.t(), call, ctx.scale)
            for grad, part, rows in zip(grads, parts, (call.query_rows_R, *2 * [call.key_rows_C]), strict=True):
                if rows is None:
                    grad += part
                else:
                    grad.index_add_(0, rows, part.to(exact))
        given = (query_THE, key_UJE, value_UJF)
        return *(grad.to(tensor.dtype) for grad, tensor in zip(grads, given, strict=True)), None, None, None


def _keys(call: FlashCall, key_UJE: torch.Tensor, value_UJF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _picked(key_UJE, call.key_rows_C), _picked(value_UJF, call.key_rows_C)


def _picked(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)
