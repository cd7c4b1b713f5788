"""Which tokens of a sequence each context-parallel rank holds. Plain numbers; no torch.

A padded sequence is cut into 2 × cp equal chunks; rank r holds the chunks r and 2·cp − 1 − r, one near each end, so
that with causal attention all ranks have the same work (zig-zag ring attention; Megatron-Core lays tokens out so too).
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.errors import ConfigError


def padded_length(length: int, *, context_parallel_size: int, multiple: int = 1) -> int:
    """The length that a sequence is padded to.

    Args:
        length: Its tokens.
        context_parallel_size: Number of ranks; on one nothing is cut.
        multiple: What each rank's part must be a multiple of, such as the tensor-parallel size under sequence
            parallelism. Each chunk then is one too.

    Returns:
        The next multiple of 2 × cp × ``multiple``; of ``multiple`` alone on one rank.

    Raises:
        ConfigError: A number is out of range.
    """
    _check_rank(0, context_parallel_size)
    if length < 0 or multiple < 1:
        raise ConfigError(f"cannot pad {length} tokens to a multiple of {multiple}; give 0 or more, and 1 or more")
    unit = multiple * _num_chunks(context_parallel_size)
    return -(-length // unit) * unit


def zigzag_ranges(length: int, *, context_parallel_size: int, rank: int) -> list[range]:
    """The positions that a rank holds, as ranges in the order in which it holds them.

    Args:
        length: A padded length.
        context_parallel_size: Number of ranks.
        rank: Which of them.

    Returns:
        Two ranges of length / (2 × cp); on one rank, the whole sequence.

    Raises:
        ConfigError: The rank is none, or the length does not split into equal chunks.
    """
    _check_rank(rank, context_parallel_size)
    chunk = _chunk(length, context_parallel_size)
    if context_parallel_size == 1:
        return [range(length)]
    return [range(at * chunk, (at + 1) * chunk) for at in (rank, 2 * context_parallel_size - 1 - rank)]


def zigzag_positions(lengths: Sequence[int], *, context_parallel_size: int, rank: int) -> list[int]:
    """The positions that a rank holds of several sequences that lie one after the other.

    Args:
        lengths: Padded lengths, T in all.
        context_parallel_size: Number of ranks.
        rank: Which of them.

    Returns:
        T / cp positions in 0 … T − 1: with them as index, a flat tensor [T] gives the rank's part.

    Raises:
        ConfigError: As :func:`zigzag_ranges`.
    """
    positions: list[int] = []
    start = 0
    for length in lengths:
        for part in zigzag_ranges(length, context_parallel_size=context_parallel_size, rank=rank):
            positions.extend(range(start + part.start, start + part.stop))
        start += length
    return positions


def zigzag_inverse(lengths: Sequence[int], *, context_parallel_size: int) -> list[int]:
    """Where each token lies in the ranks' parts, put one after the other from rank 0 on.

    Args:
        lengths: Padded lengths, T in all.
        context_parallel_size: Number of ranks.

    Returns:
        T positions: with them as index, the gathered parts [T] give the sequences in order.

    Raises:
        ConfigError: A length does not split into equal chunks.
    """
    inverse = [0] * sum(lengths)
    gathered = 0
    for rank in range(context_parallel_size):
        for position in zigzag_positions(lengths, context_parallel_size=context_parallel_size, rank=rank):
            inverse[position] = gathered
            gathered += 1
    return inverse


def zigzag_owner(position: int, *, length: int, context_parallel_size: int) -> tuple[int, int]:
    """Who holds one token of a sequence.

    Args:
        position: 0 … length − 1.
        length: The padded length.
        context_parallel_size: Number of ranks.

    Returns:
        The rank, and the token's place in that rank's part of the sequence.

    Raises:
        ConfigError: The position lies outside, or the length does not split into equal chunks.
    """
    chunk = _chunk(length, context_parallel_size)
    if not 0 <= position < length:
        raise ConfigError(f"position {position} is outside a sequence of {length} tokens")
    if context_parallel_size == 1:
        return 0, position
    number, offset = divmod(position, chunk)
    mirrored = 2 * context_parallel_size - 1 - number
    return (number, offset) if number < mirrored else (mirrored, chunk + offset)


def _num_chunks(context_parallel_size: int) -> int:
    return 1 if context_parallel_size == 1 else 2 * context_parallel_size


def _chunk(length: int, context_parallel_size: int) -> int:
    _check_rank(0, context_parallel_size)
    chunks = _num_chunks(context_parallel_size)
    if length < 0 or length % chunks:
        raise ConfigError(
            f"{length} tokens do not split into {chunks} chunks for context-parallel size {context_parallel_size}; "
            "pad the sequence to padded_length first"
        )
    return length // chunks


def _check_rank(rank: int, context_parallel_size: int) -> None:
    if not 0 <= rank < context_parallel_size:
        raise ConfigError(f"context-parallel rank {rank} of {context_parallel_size}; allowed: 0 up to the size, less 1")
