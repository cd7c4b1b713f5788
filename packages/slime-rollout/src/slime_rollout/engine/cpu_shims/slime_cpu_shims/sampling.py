"""Reproducible sampling in plain torch: the same tokens as SGLang's Triton kernel draws from the same seeds.

B: rows of the batch, V: vocabulary.
"""

import torch

# MurmurHash3, x86 32-bit variant (Austin Appleby, 2011, public domain), over four 32-bit blocks: seed's low half,
# seed's high half, position, column. int32 products wrap around, which is all that the unsigned ones do.
BITS = 32
LENGTH = 16
# Rows that are hashed together: their temporaries stay in the processor's cache.
ROWS = 2
MARGIN = 0.25


def _signed(constant):
    return constant - (1 << BITS) if constant >> (BITS - 1) else constant


C1, C2, M, N = _signed(0xCC9E2D51), _signed(0x1B873593), 5, _signed(0xE6546B64)
F1, F2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def multinomial_with_seed(logprobs, seed, positions):
    """One sample per row, a function of seed and position alone (Gumbel-max; Gumbel, 1954).

    ``logprobs`` are ``[B, V]``, not necessarily normalised; 64-bit seeds and positions are ``[B]``. Returns the sampled
    columns ``[B, 1]``, int64.
    """
    weights = (logprobs - logprobs.amax(1, keepdim=True)).exp_()
    return _draw(weights, seed, positions, lambda row, column: logprobs[row, column])


def sampling_from_probs(original, probs, sampling_seed=None, positions=None):
    """Around SGLang's ``sampling_from_probs_torch``: the same without the logarithms of all probabilities."""
    if sampling_seed is None:
        return original(probs, sampling_seed, positions)
    drawn = _draw(probs, sampling_seed, positions, lambda row, column: probs[row, column].log())
    return drawn.view(-1).to(torch.int32)


def narrowed_sampling(original, probs, top_ks, top_ps, min_ps, need_min_p, sampling_seed, positions, **how):
    """Around SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch``: rows without top-k and top-p draw as alone.

    SGLang takes this function for all rows of a batch as soon as one of them has a top-k or a top-p, a health check
    among them, and until the batch is empty. It draws by a token's place among the sorted probabilities, so such a row
    would get other tokens than without the neighbour.
    """
    sampled = original(probs, top_ks, top_ps, min_ps, need_min_p, sampling_seed, positions, **how)
    whole = (top_ks >= probs.shape[-1]) & (top_ps >= 1)
    if sampling_seed is None or not whole.any():
        return sampled
    weights = probs[whole]
    drawn = _draw(weights, sampling_seed[whole], positions[whole], lambda row, column: weights[row, column].log())
    tokens, *captured = sampled if isinstance(sampled, tuple) else (sampled,)
    tokens[whole] = drawn.view(-1).to(tokens.dtype)
    if captured:  # what was kept and in which order, and the weight of the token
        captured[-1][whole] = weights.gather(1, drawn).view(-1)
    return sampled


def _draw(weights, seed, positions, log_probs_at):
    """The column of each row where log-prob plus Gumbel noise is largest, in float64 ``[B, 1]``.

    float64 logarithms of every hash are most of the time. So float32 finds the few columns that can be the largest:
    log w - log(-log u) is largest where w / -log u is.
    """
    state = hash_of_seed(seed.view(-1), positions.view(-1))
    columns = _scramble(torch.arange(weights.shape[1], dtype=torch.int32))
    found = []
    for start in range(0, weights.shape[0], ROWS):
        part = slice(start, start + ROWS)
        hashed = hash_of_columns(state[part], columns)
        row, column = _near_largest(weights[part], hashed)
        found.append((row + start, column, hashed[row, column]))
    row, column, hashed = (torch.cat(each) for each in zip(*found, strict=True))
    noisy = _gumbel(hashed) + log_probs_at(row, column)
    shape = weights.shape[:1]
    largest = torch.full(shape, -torch.inf, dtype=torch.float64).scatter_reduce_(0, row, noisy, "amax")
    ties = column.where(noisy == largest[row], weights.shape[1] - 1)
    return torch.full(shape, weights.shape[1] - 1).scatter_reduce_(0, row, ties, "amin")[:, None]


def _near_largest(weights, hashed):
    """Rows and columns where w / -log u, in float32, is at least a quarter of a row's largest.

    The margin leaves room for what float32 gets wrong. Counted down from one, u = 1 - t, it is exact to a few last bits
    but where u is near zero. There -log u is at most 22.2, and is taken as 11.09 from 2⁻¹⁶ on: that makes a sum up to
    twice as large. (The hash 0, one in 2³², is worse off.)
    """
    t = hashed.view(torch.int32).bitwise_not().view(torch.uint32).to(torch.float32)
    t.mul_(2.0**-BITS).clamp_(min=2.0**-BITS, max=1 - 2.0**-16)
    ratio = torch.div(weights, t.neg_().log1p_().neg_())
    return (ratio >= ratio.amax(1, keepdim=True).mul_(MARGIN)).nonzero(as_tuple=True)


def murmur_hash32(seed, positions, col_indices):
    """The hash ``[B, V]``, uint32, of (seed, position, column), in place of SGLang's function of that name.

    64-bit seeds and positions are ``[B]``, columns ``[V]``.
    """
    return hash_of_columns(hash_of_seed(seed, positions), _scramble(_low_half(col_indices)))


def hash_of_seed(seed, positions):
    """The hash's state after its first three blocks ``[B]``, int32."""
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    h = torch.zeros_like(seed, dtype=torch.int32)
    for block in (seed, seed >> BITS, positions):
        h = _mix(h, _scramble(_low_half(block)))
    return h


def hash_of_columns(state, columns):
    """The finished hashes ``[B, V]``, uint32, from the state ``[B]`` and the scrambled columns ``[V]``."""
    h = _mix(state[:, None], columns[None, :]).bitwise_xor_(LENGTH)
    h.bitwise_xor_(_shift_right(h, 16)).mul_(F1)
    h.bitwise_xor_(_shift_right(h, 13)).mul_(F2)
    return h.bitwise_xor_(_shift_right(h, 16)).view(torch.uint32)


def _low_half(x):
    """The low 32 bits as int32."""
    return x.to(torch.int64).bitwise_left_shift(BITS).bitwise_right_shift_(BITS).to(torch.int32)


def _shift_right(x, bits):
    """Zeros come in from the left, not copies of the sign."""
    return (x >> bits).bitwise_and_((1 << (BITS - bits)) - 1)


def _rotl(x, bits):
    return (x << bits).bitwise_or_(_shift_right(x, BITS - bits))


def _scramble(k):
    return _rotl(k * C1, 15).mul_(C2)


def _mix(h, k):
    return _rotl(h ^ k, 13).mul_(M).add_(N)


def _gumbel(hashed):
    """Gumbel noise from uniform hashes, in float64. The ends are clamped as in SGLang, at one the noise is infinite."""
    uniform = hashed.to(torch.float64).div_(torch.iinfo(torch.uint32).max)
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-BITS)).neg_()
    return uniform.log_().neg_()
