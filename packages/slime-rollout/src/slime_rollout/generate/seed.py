"""One seed for each request, so that a sample's tokens depend on nothing that ran beside it."""

from __future__ import annotations

import hashlib


def sampling_seed(run_seed: int, sample_index: int, turn: int = 0, stream: str = "rollout") -> int:
    """Seed of one generation request.

    The first 63 bits of BLAKE2b over the text ``stream:run_seed:sample_index:turn``: the same in every process, Python
    version and machine, and without relation between neighbouring samples. 63 bits, as SGLang takes a signed 64-bit
    number.

    Args:
        run_seed: Seed of the run.
        sample_index: Number of the sample in its stream.
        turn: Number of the request within the sample.
        stream: What the sample is for. Evaluation has streams of its own, so that it disturbs no rollout.

    Returns:
        A number from 0 to 2**63 - 1.
    """
    text = f"{stream}:{run_seed}:{sample_index}:{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
