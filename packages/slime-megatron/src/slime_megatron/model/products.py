"""Variable-length attention as batched products in plain PyTorch: for CPUs, and wherever flash attention does not run.

Torch's flash kernel for CPUs has no variable lengths, and its backward pass in bf16 is 5 to 10 times slower than
products. Scores are computed again in the backward pass, so that they are never all in memory; of each query, their
maximum and the sum of exp(score − maximum) are kept (Dao et al., 2022, algorithm 4).

Notation: T queries and U keys of a packed row, H query heads, J key/value heads (J divides H), S query heads per key
    head (H / J), E channels of queries and keys, F of values. In a product: G pieces, Q queries and K keys of a piece,
    B = J·G, X = Q·S. Y stands for S·E, S·F or S.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int64]

CHUNK = 256  # queries of a causal piece: half of its last so many keys are computed for nothing
LARGEST = 1 << 20  # scores of a product, per head: bounds its memory
OVERHEAD = 4096  # scores, per head, that take as long as starting another product

Rows = slice | torch.Tensor
"""Which rows of a packed tensor a product takes: consecutive ones, or G·Q (or G·K) given one by one."""


@dataclass(frozen=True)
class Product:
    """Pieces of runs, of nearly equal shape, that one batched product computes.

    Attributes:
        query_rows: Rows of the queries. Those that only pad are T, one more than there is.
        key_rows: Rows of the keys, likewise.
        pieces: G.
        seen: How many first keys every query sees.
        hidden_GQW: True where a query does not see one of the other keys; ``None`` where there is none such. G or Q may
            be 1 instead.
        continues: Whether an earlier product has the same queries and other keys.
    """

    query_rows: Rows
    key_rows: Rows
    pieces: int
    seen: int
    hidden_GQW: torch.Tensor | None
    continues: bool

    @property
    def num_scores(self) -> int:
        """Scores that are computed, per head."""
        return _count(self.query_rows) * (_count(self.key_rows) // self.pieces)


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


@dataclass(frozen=True)
class Pieces:
    """Queries and the keys that they see, piece by piece; arrays of one length.

    Attributes:
        query_starts: First query of each piece, a row of the T.
        queries: How many queries it has.
        key_starts: Where its keys start in ``key_rows``.
        keys: How many they are.
        key_rows: Rows of the U.
        causal: Whether the last query of a piece sees all its keys and each one before it one less; else all see all.
    """

    query_starts: Integers
    queries: Integers
    key_starts: Integers
    keys: Integers
    key_rows: Integers
    causal: bool


def cut(query_starts: Integers, queries: Integers, keys: Integers, key_rows: Integers, *, causal: bool) -> Pieces:
    """Cut runs of queries and keys into pieces: a causal run then computes little above its diagonal.

    The runs are described as :class:`Pieces` are; the rows of their keys follow one another in ``key_rows``. In a
    ``causal`` run query q sees the first q + 1 keys, as many as there are; else all see all.
    """
    chunks = np.clip(LARGEST // np.maximum(keys, 1), 32, CHUNK)
    counts = -(-queries // chunks)
    run = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(run)) - np.repeat(counts.cumsum() - counts, counts)) * chunks[run]
    own, key_starts = np.minimum(chunks[run], queries[run] - first), (keys.cumsum() - keys)[run]
    return Pieces(query_starts[run] + first, own, key_starts, first + own if causal else keys[run], key_rows, causal)


def products(pieces: Pieces, num_queries: int, num_keys: int, device: torch.device | None) -> Iterator[Product]:
    """Group pieces by shape. They are padded to a common one where that is less work than another product."""
    order = np.lexsort((-pieces.queries, -pieces.keys))
    for members in _alike(pieces.keys[order], pieces.queries[order]):
        yield _product(pieces, order[members], num_queries, num_keys, device)


def _alike(keys: Integers, queries: Integers) -> Iterator[slice]:
    """Pieces, sorted by falling numbers of keys, that are worth padding to one shape."""
    shapes, starts, counts = np.unique(np.stack([-keys, -queries]), axis=1, return_index=True, return_counts=True)
    start, end, width, height = 0, 0, 0, 0
    groups = zip(shapes.T.tolist(), starts.tolist(), counts.tolist(), strict=True)
    for (minus_keys, minus_queries), first, count in groups:
        taller = max(height, -minus_queries)
        padding = (end - start) * width * (taller - height) + count * (width * taller - minus_keys * minus_queries)
        if start == end or padding > OVERHEAD or (end - start + count) * width * taller > LARGEST:
            if end > start:
                yield slice(start, end)
            start, width, taller = first, -minus_keys, -minus_queries
        height, end = taller, first + count
        most = max(1, LARGEST // (width * height))
        while end - start > most:
            yield slice(start, start + most)
            start += most
    if end > start:
        yield slice(start, end)


def _product(pieces: Pieces, chosen: Integers, num_queries: int, num_keys: int, device: torch.device | None) -> Product:
    queries, keys = pieces.queries[chosen], pieces.keys[chosen]
    # The first query of a causal piece sees as many keys as it has before the piece, and itself.
    sees_at_least = keys - queries + 1 if pieces.causal else keys
    seen, width, height = int(sees_at_least.min()), int(keys.max()), int(queries.max())
    hidden = None
    if seen < width and pieces.causal and (sees_at_least == seen).all():
        hidden = _triangle(height, width - seen, device)
    elif seen < width:
        last = sees_at_least[:, None] + (np.arange(height) if pieces.causal else np.zeros(1, np.int64))
        hidden = torch.from_numpy(np.arange(seen, width) >= last[:, :, None]).to(device)
    starts, key_starts = pieces.query_starts[chosen], pieces.key_starts[chosen]
    if len(chosen) == 1:
        query_rows: Rows = slice(int(starts[0]), int(starts[0]) + height)
        own = pieces.key_rows[key_starts[0] : key_starts[0] + width]
        is_slice = own[-1] - own[0] == width - 1 and (pieces.causal or bool((np.diff(own) == 1).all()))
        key_rows: Rows = slice(int(own[0]), int(own[-1]) + 1) if is_slice else torch.from_numpy(own).to(device)
    else:
        query_rows = _padded(starts, queries, num_queries).to(device)
        key_rows = _padded(key_starts, keys, num_keys, pieces.key_rows).to(device)
    return Product(query_rows, key_rows, len(chosen), seen, hidden, not pieces.causal)


@functools.lru_cache(maxsize=64)
def _triangle(height: int, width: int, device: torch.device | None) -> torch.Tensor:
    """1 × Q × W: query q does not see key q and those after it."""
    return torch.ones(1, height, width, dtype=torch.bool, device=device).triu()


def _padded(starts: Integers, lengths: Integers, padding: int, rows: Integers | None = None) -> torch.Tensor:
    """Consecutive places from each start, or the rows there, as equally many of each."""
    places = np.arange(lengths.max())
    padded = starts[:, None] + places
    if rows is not None:
        padded = rows[np.minimum(padded, len(rows) - 1)]
    padded[places >= lengths[:, None]] = padding
    return torch.from_numpy(padded.ravel())


class ProductAttention(torch.autograd.Function):
    """Attention of T × H × E queries to U × J × E keys; the softmax is computed in fp32.

    Key heads come first, and the query heads that share one become rows of one product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THE: torch.Tensor,
        key_UJE: torch.Tensor,
        value_UJF: torch.Tensor,
        products: Sequence[Product],
        scale: float,
    ) -> torch.Tensor:
        """The output, T × H × F."""
        tokens, heads, _ = query_THE.shape
        key_heads, width = value_UJF.shape[1:]
        shared, exact = heads // key_heads, torch.promote_types(query_THE.dtype, torch.float32)
        query, key, value = _heads_first(query_THE, key_heads, scale), _heads_first(key_UJE), _heads_first(value_UJF)
        output = query.new_empty(key_heads, tokens + 1, shared * width)
        largest, total = torch.empty(2, key_heads, tokens + 1, shared, dtype=exact, device=query.device)
        for product in products:
            rows = product.query_rows
            key_BKE, value_BKF = (_picked(tensor, product.key_rows, product) for tensor in (key, value))
            scores_BXK = _scores(product, _picked(query, rows, product, shared), key_BKE, shared).to(exact)
            largest_BX1 = scores_BXK.amax(-1, keepdim=True)
            probs_BXK = scores_BXK.sub_(largest_BX1).exp_()
            total_BX1 = probs_BXK.sum(-1, keepdim=True)
            output_BXF = torch.bmm(probs_BXK.div_(total_BX1).to(value.dtype), value_BKF)
            if product.continues:
                before, maxima, sums = (_picked(part, rows, product, shared) for part in (output, largest, total))
                output_BXF, largest_BX1, total_BX1 = _merged(before, maxima, sums, output_BXF, largest_BX1, total_BX1)
            for whole, part in ((output, output_BXF), (largest, largest_BX1), (total, total_BX1)):
                _put(whole, product, part)
        output_THF = _tokens_first(output, heads)
        ctx.save_for_backward(query, key, value, output_THF, largest, total)
        ctx.products, ctx.scale = products, scale
        return output_THF

    @staticmethod
    def backward(ctx: Any, grad_THF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        query, key, value, output_THF, largest, total = ctx.saved_tensors
        heads, key_heads, shared, exact = output_THF.shape[1], len(key), total.shape[-1], total.dtype
        grad = _heads_first(grad_THF, key_heads)
        # Σ over keys of a probability times its gradient.
        mean = _heads_first((grad_THF * output_THF).sum(-1, dtype=exact), key_heads)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=exact) for tensor in (key, value))
        for product in ctx.products:
            key_BKE, value_BKF = (_picked(tensor, product.key_rows, product) for tensor in (key, value))
            query_BXE, grad_BXF, largest_BX1, total_BX1, mean_BX1 = (
                _picked(tensor, product.query_rows, product, shared) for tensor in (query, grad, largest, total, mean)
            )
            scores_BXK = _scores(product, query_BXE, key_BKE, shared).to(exact)
            probs_BXK = scores_BXK.sub_(largest_BX1).exp_().div_(total_BX1)
            _add(grad_value, product, torch.bmm(probs_BXK.to(grad.dtype).transpose(1, 2), grad_BXF))
            slope_BXK = torch.bmm(grad_BXF, value_BKF.transpose(1, 2)).to(exact).sub_(mean_BX1).mul_(probs_BXK)
            slope_BXK = slope_BXK.to(grad.dtype)
            _add(grad_key, product, torch.bmm(slope_BXK.transpose(1, 2), query_BXE))
            grad_BXE = torch.bmm(slope_BXK, key_BKE)
            if product.continues:
                grad_BXE += _picked(grad_query, product.query_rows, product, shared)
            _put(grad_query, product, grad_BXE)
        grads = _tokens_first(grad_key, key_heads, key.dtype), _tokens_first(grad_value, key_heads, value.dtype)
        return _tokens_first(grad_query, heads, scale=ctx.scale), *grads, None, None


def _merged(
    output_XF: torch.Tensor,
    largest_X1: torch.Tensor,
    total_X1: torch.Tensor,
    other_XF: torch.Tensor,
    other_largest_X1: torch.Tensor,
    other_total_X1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kept results of two sets of keys, from those of each."""
    both_X1 = torch.maximum(largest_X1, other_largest_X1)
    part_X1 = other_total_X1 * (other_largest_X1 - both_X1).exp_()
    sum_X1 = part_X1 + total_X1 * (largest_X1 - both_X1).exp_()
    return torch.lerp(output_XF, other_XF, (part_X1 / sum_X1).to(output_XF.dtype)), both_X1, sum_X1


def _heads_first(tensor_THE: torch.Tensor, key_heads: int | None = None, scale: float | None = None) -> torch.Tensor:
    """Times a factor, J × (T + 1) × Y; the last row is zeros, for padding."""
    tokens = len(tensor_THE)
    tensor_JTY = tensor_THE.reshape(tokens, key_heads or tensor_THE.shape[1], -1).transpose(0, 1)
    result = tensor_JTY.new_empty(tensor_JTY.shape[0], tokens + 1, tensor_JTY.shape[2])
    if scale is None:
        result[:, :tokens] = tensor_JTY
    else:
        torch.mul(tensor_JTY, scale, out=result[:, :tokens])
    result[:, tokens] = 0
    return result


def _tokens_first(
    tensor_JTY: torch.Tensor, heads: int, dtype: torch.dtype | None = None, scale: float | None = None
) -> torch.Tensor:
    """Back to T × H × F, times a factor."""
    tensor_TJY = tensor_JTY[:, :-1].transpose(0, 1)
    result = torch.empty(tensor_TJY.shape, dtype=dtype or tensor_JTY.dtype, device=tensor_JTY.device)
    if scale is None:
        result.copy_(tensor_TJY)
    else:
        torch.mul(tensor_TJY, scale, out=result)
    return result.view(len(result), heads, -1)


def _picked(tensor_JTY: torch.Tensor, rows: Rows, product: Product, shared: int = 1) -> torch.Tensor:
    """Rows of a product: B × X × E, of query heads, or B × K × E."""
    if isinstance(rows, slice):
        picked = tensor_JTY[:, rows]
        return picked if shared == 1 else picked.reshape(len(tensor_JTY), picked.shape[1] * shared, -1)
    picked = tensor_JTY.index_select(1, rows)
    return picked.reshape(len(tensor_JTY) * product.pieces, picked.shape[1] // product.pieces * shared, -1)


def _put(tensor_JTY: torch.Tensor, product: Product, values_BXE: torch.Tensor) -> None:
    """Write a product's queries."""
    rows = product.query_rows
    values_JQY = values_BXE.view(len(tensor_JTY), _count(rows), -1)
    if isinstance(rows, slice):
        tensor_JTY[:, rows] = values_JQY
    else:
        tensor_JTY.index_copy_(1, rows, values_JQY)


def _add(tensor_JUY: torch.Tensor, product: Product, values_BKE: torch.Tensor) -> None:
    """Add to a product's keys."""
    rows = product.key_rows
    values_JKY = values_BKE.view(len(tensor_JUY), _count(rows), -1)
    if isinstance(rows, slice):
        tensor_JUY[:, rows] += values_JKY
    else:
        tensor_JUY.index_add_(1, rows, values_JKY.to(tensor_JUY.dtype))


def _scores(product: Product, query_BXE: torch.Tensor, key_BKE: torch.Tensor, shared: int) -> torch.Tensor:
    """Scores of a product, −∞ where a query does not see a key: B × X × K."""
    scores_BXK = torch.bmm(query_BXE, key_BKE.transpose(1, 2))
    hidden_GQW = product.hidden_GQW
    if hidden_GQW is not None:
        scores_JGQSK = scores_BXK.view(-1, product.pieces, query_BXE.shape[1] // shared, shared, scores_BXK.shape[-1])
        scores_JGQSK[..., product.seen :].masked_fill_(hidden_GQW[:, :, None], -torch.inf)
    return scores_BXK
