"""Attention of many short sequences at once, for SGLang's torch-native backend.

SGLang calls one scaled-dot-product attention per sequence and layer; with 128 short sequences that is half of the time
of a decode step. Here sequences of like length share one call. Query heads of one KV head become extra query rows
(grouped-query attention; Ainslie et al., 2023, arXiv:2305.13245), so K and V are not repeated.

A token's padded length depends on its place alone, never on its neighbours, and rows of a batched call don't mix: what
a token gets does not depend on which others are in the batch, nor on which of its own sequence are computed with it.

B: sequences or pieces of them, Q: new tokens of one, K: tokens that it sees in the cache, H: query heads, N: KV heads,
G = H / N, D: head size, T: new tokens of all sequences.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

# Lengths are padded to multiples of these.
QUERY_STEP = 16
KEY_STEP = 64
# Query rows of one KV head are padded to multiples of this. With one or three fp32 rows and several threads, torch's
# kernel gives a sequence other last bits than it gets among other neighbours.
ROW_STEP = 4
# Most mask entries (B·Q·K) of one call. A call of one long sequence may have more.
MASK_ENTRIES = 1 << 20


class Piece(NamedTuple):
    """New tokens of one sequence that have the same padded number of keys."""

    sequence: int
    start: int
    """The first one's row among the queries."""
    key_len: int
    """Keys that the last one sees."""
    query_len: int


class Part:
    """Pieces that share one call, and where their rows are; the same in all layers of a pass."""

    def __init__(self, pieces, req_to_token, req_pool_indices, tokens, groups, dtype):
        sequences = [piece.sequence for piece in pieces]
        start, key_len, query_len = torch.tensor([piece[1:] for piece in pieces]).T[:, :, None]
        rows = _padded(pieces[0].query_len, QUERY_STEP)
        columns = min(_padded(pieces[0].key_len, KEY_STEP), req_to_token.shape[1])
        # Padding repeats a piece's last query and last key; `real` and the mask leave the copies out.
        row_BQ = torch.arange(rows).expand(len(pieces), rows)
        real_BQ = row_BQ < query_len
        row_BQ = torch.minimum(row_BQ, query_len - 1)
        column_K = torch.arange(columns)
        self.slot_BK = req_to_token[req_pool_indices[sequences][:, None], torch.minimum(column_K, key_len - 1)]
        self.token_BQ = start + row_BQ
        self.target = self.token_BQ[real_BQ]
        self.source = real_BQ.flatten().nonzero()[:, 0]
        # One new token of every sequence, as in a decode step: queries and results lie as they are needed.
        self.is_whole = rows == 1 and len(pieces) == tokens
        mask_BQK = column_K <= (key_len - query_len + row_BQ)[:, :, None]
        mask = pad(mask_BQK.repeat(1, groups, 1), (0, 0, 0, -groups * rows % ROW_STEP), value=True)[:, None]
        self.bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def plan(req_to_token, req_pool_indices, key_lens, query_lens, groups, dtype):
    """The calls that attend to all sequences, for ``groups`` query heads of ``dtype`` to a KV head.

    Args:
        req_to_token: Slots of each request's tokens ``[requests, longest]``.
        req_pool_indices: Row of ``req_to_token`` for each sequence ``[B]``.
        key_lens: Tokens in the cache for each sequence, the new ones included; B ints.
        query_lens: New tokens of each sequence; B ints. They are the last ones.
    """
    pieces = list(cut(key_lens, query_lens))
    where = (req_to_token, req_pool_indices, sum(query_lens), groups, dtype)
    return [Part(alike, *where) for alike in _alike(pieces)]


def cut(key_lens, query_lens):
    """The new tokens of each sequence, where their padded number of keys changes.

    So each token's depends on its place alone, not on which tokens were computed with it or came from the cache: a
    product over 192 keys adds them up in another order than one over 256.
    """
    row = 0
    for sequence, (end, new) in enumerate(zip(key_lens, query_lens, strict=True)):
        place = end - new
        while place < end:
            until = min(end, (place // KEY_STEP + 1) * KEY_STEP)
            yield Piece(sequence, row, until, until - place)
            row, place = row + until - place, until


def attend(query_THD, output_THD, k_cache, v_cache, parts, scaling):
    """Causal attention by a plan, into ``output_THD``; queries are those of the new tokens, sequence after sequence.

    Keys and values are ``[slots, N, D]``; the new tokens' are already there.
    """
    for part in parts:
        query_BQHD = query_THD[:, None] if part.is_whole else _take(query_THD, part.token_BQ)
        key_BKND, value_BKND = _take(k_cache, part.slot_BK), _take(v_cache, part.slot_BK)
        out_BQHD = _grouped(query_BQHD, key_BKND, value_BKND, part.bias, scaling)
        if part.is_whole:
            output_THD.copy_(out_BQHD[:, 0])
        else:
            output_THD[part.target] = _take(out_BQHD.flatten(0, 1), part.source)
    return output_THD


def _take(rows, indices):
    """``rows[indices]``; an embedding look-up does the same several times faster."""
    return embedding(indices, rows.flatten(1)).unflatten(-1, rows.shape[1:])


def _grouped(query_BQHD, key_BKND, value_BKND, bias, scaling):
    """Attention with the query heads of one KV head as further query rows."""
    rows, heads = query_BQHD.shape[1:3]
    kv_heads = key_BKND.shape[2]
    groups = heads // kv_heads
    query = query_BQHD.unflatten(2, (kv_heads, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    key, value = (cached.transpose(1, 2).to(query.dtype) for cached in (key_BKND, value_BKND))
    if extra := bias.shape[2] - query.shape[2]:
        query = pad(query, (0, 0, 0, extra))
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)[:, :, : groups * rows]
    return out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _padded(length, step):
    """One query stays one: a decode step needs no padding."""
    return 1 if length == 1 else -(-length // step) * step


def _alike(pieces):
    """Pieces of equal padded lengths, as many at a time as have a mask that is not too large."""
    order = {}
    for piece in pieces:
        order.setdefault((_padded(piece.key_len, KEY_STEP), _padded(piece.query_len, QUERY_STEP)), []).append(piece)
    for (columns, rows), alike in order.items():
        most = max(1, MASK_ENTRIES // (rows * columns))
        for first in range(0, len(alike), most):
            yield alike[first : first + most]


def decode(original, backend, *args, **kwargs):
    """Around SGLang's ``TorchNativeAttnBackend._run_sdpa_forward_decode``: one new token per sequence."""
    if _is_special(args, kwargs, plain=7):
        return original(backend, *args, **kwargs)
    return _of_pass(backend, *args[:7], None, kwargs["scaling"])


def extend(original, backend, *args, **kwargs):
    """Around SGLang's ``TorchNativeAttnBackend._run_sdpa_forward_extend``: several new tokens per sequence."""
    if _is_special(args, kwargs, plain=9) or not kwargs["causal"]:
        return original(backend, *args, **kwargs)
    *tensors, seq_lens, _prefix_lens, query_lens = args[:9]
    return _of_pass(backend, *tensors, seq_lens, query_lens, kwargs["scaling"])


def forget(_result, backend, *_args, **_kwargs):
    """After ``TorchNativeAttnBackend.init_forward_metadata``, which begins every pass through the model."""
    backend.slime_plan = None


def _of_pass(backend, query, output, k_cache, v_cache, req_to_token, requests, seq_lens, query_lens, scaling):
    """Attention by the plan that the pass's first layer made: a third of the time went into making one per layer."""
    key = query.shape[1] // k_cache.shape[1], query.dtype
    of, made_for, parts = getattr(backend, "slime_plan", None) or (None, None, None)
    if of is not seq_lens or made_for != key:
        lens = seq_lens.tolist()
        new = [1] * len(lens) if query_lens is None else query_lens.tolist()
        parts = plan(req_to_token, requests, lens, new, *key)
        backend.slime_plan = seq_lens, key, parts
    return attend(query, output, k_cache, v_cache, parts, scaling)


def _is_special(args, kwargs, plain):
    """Encoders (given after the ``plain`` positional arguments) and sliding windows are left to SGLang."""
    encoder = any(argument is not None for argument in args[plain:])
    return encoder or kwargs["is_cross_attn"] or kwargs["sliding_window_size"] is not None
