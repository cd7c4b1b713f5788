"""Reproducible sampling in plain torch: the same tokens as SGLang's Triton kernel draws from the same seeds.

B: rows of the batch, V: vocabulary.
"""

import torch

# MurmurHash3, x86 32-bit variant (Austin Appleby, 2011, public domain), over four 32-bit blocks: seed's low half,
# seed's high half, position, column. int64 holds a product of two 32-bit numbers modulo 2^64; masking gives uint32.
MASK = 0xFFFFFFFF
C1, C2, M, N = 0xCC9E2D51, 0x1B873593, 5, 0xE6546B64
F1, F2 = 0x85EBCA6B, 0xC2B2AE35
LENGTH = 16
# Rows that are hashed together: their temporaries stay in the processor's cache.
ROWS = 2


def murmur_hash32(seed, positions, col_indices):
    """The hash of (seed, position, column), as int64 in [0, 2^32).

    Args:
        seed: 64-bit seeds ``[B]``.
        positions: Token positions ``[B]``.
        col_indices: Columns ``[V]``.

    Returns:
        Hashes ``[B, V]``.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    h = torch.zeros_like(seed)
    for block in (seed & MASK, (seed >> 32) & MASK, positions.to(torch.int64) & MASK):
        h = _mix(h, _scramble(block))
    h = _mix(h[:, None], _scramble(col_indices.to(torch.int64) & MASK)[None, :])
    h ^= LENGTH
    h ^= h >> 16
    h = h.mul_(F1).bitwise_and_(MASK)
    h ^= h >> 13
    h = h.mul_(F2).bitwise_and_(MASK)
    h ^= h >> 16
    return h


def _rotl(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & MASK


def _scramble(k):
    return (_rotl((k * C1) & MASK, 15) * C2) & MASK


def _mix(h, k):
    return (_rotl(h ^ k, 13) * M + N) & MASK


def multinomial_with_seed(logprobs, seed, positions):
    """One sample per row, a function of seed and position alone (Gumbel-max; Gumbel, 1954).

    Args:
        logprobs: Log-probs ``[B, V]``, not necessarily normalised.
        seed: Seeds ``[B]``.
        positions: Token positions ``[B]``.

    Returns:
        Sampled columns ``[B, 1]``, int64.
    """
    columns = torch.arange(logprobs.shape[1])
    seed, positions = seed.view(-1), positions.view(-1)
    rows = []
    for start in range(0, logprobs.shape[0], ROWS):
        part = slice(start, start + ROWS)
        rows.append(_sample(logprobs[part], murmur_hash32(seed[part].to(torch.uint64), positions[part], columns)))
    return torch.cat(rows)


def _sample(logprobs, hashed):
    uniform = hashed.to(torch.float64).div_(MASK)
    # The ends are clamped as in SGLang: at 1 the noise would be infinite, so its cap is the hash's spacing.
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    noise = uniform.log_().neg_()
    return noise.add_(logprobs).argmax(dim=1, keepdim=True)
