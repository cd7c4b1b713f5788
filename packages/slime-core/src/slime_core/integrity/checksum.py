"""Checksums of tensors that any device computes at memory speed, over dtype, shape and bits.

The bytes are cut into blocks of 64 KiB, each block's little-endian 64-bit words w_i are hashed to two numbers modulo
2^64, and BLAKE2b-128 (RFC 7693) runs over dtype, shape and the blocks' numbers in order. With fixed odd keys k_i, l_i:

    h_1 = Σ k_i w_i        h_2 = Σ l_i ⌊w_i / 2^32⌋   (words taken as signed)

A block hash is the multilinear family of Lemire and Kaser, "Strongly universal string hashing is fast" (2014), on
32-bit characters: h_2 sees the upper halves, and where those agree h_1 differs by Σ k_i d_i with |d_i| < 2^32.
For random keys two given different blocks collide with a chance of at most 2^-32, and of about 2^-64 or less unless
all differences are multiples of large powers of two. For these very keys, a change to a single word and a swap of two
different words are caught for certain: the keys are odd, and their lower 33 bits are all different. BLAKE2b catches
what happens to whole blocks. The keys are public: this guards against faults and mix-ups, not against an attacker.

Why not CRC-32 or BLAKE2b over all bytes: both run on the CPU only, so that weights would leave the GPU first; CRC-32
has 32 bits, and BLAKE2b alone has about a third of this speed on one CPU core. Not run on CUDA yet.
"""

from __future__ import annotations

import array
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime_core.errors import DataError, IntegrityError
from slime_core.integrity.bits import as_integers, dtype_name, flat_chunks, to_bytes

CHECKSUM_ALGORITHM = "multilinear64-blake2b128"

_BLOCK_WORDS = 8192
_BLOCK_BYTES = 8 * _BLOCK_WORDS
# Blocks hashed at a time: as many as stay in a CPU's cache, or as fill a GPU (64 MiB of temporary memory).
_CPU_BLOCKS, _DEVICE_BLOCKS = 16, 1024
_SHOWN = 5


def tensor_checksum(tensor: Tensor) -> str:
    """The checksum of a tensor's dtype, shape and bits.

    The same on every device and for every memory layout. Takes about 1 MiB of memory on a CPU and 64 MiB elsewhere, and
    the same again for a tensor that is not contiguous.

    Args:
        tensor: Any dtype and shape; dense.

    Returns:
        32 hexadecimal digits.

    Raises:
        DataError: The tensor is sparse or holds no data.
    """
    stream = ChecksumStream(tensor.dtype, tensor.shape)
    stream.update(tensor)
    return stream.digest()


class ChecksumStream:
    """:func:`tensor_checksum` of a tensor that comes in parts. How it was cut makes no difference.

    Args:
        dtype: Of the whole tensor.
        shape: Of the whole tensor.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self.dtype, self.shape = dtype, tuple(shape)
        self._expected = math.prod(self.shape) * dtype.itemsize
        self._seen = 0
        head = json.dumps([CHECKSUM_ALGORITHM, dtype_name(dtype), list(self.shape)])
        self._hash = hashlib.blake2b(head.encode(), digest_size=16)
        self._rest = torch.empty(0, dtype=torch.uint8)  # the bytes of a block that is not full yet

    def update(self, part: Tensor) -> None:
        """Add the next elements.

        Args:
            part: Any shape; taken in row-major order.

        Raises:
            DataError: It has another dtype, or more elements than the whole tensor has left.
        """
        if part.dtype != self.dtype:
            raise DataError(f"a part of {dtype_name(part.dtype)} for a tensor of {dtype_name(self.dtype)}")
        integers = as_integers(part)
        size = integers.numel() * integers.element_size()
        if self._seen + size > self._expected:
            raise DataError(
                f"a tensor of shape {list(self.shape)} has {self._expected} bytes; after {self._seen}, {size} more came"
            )
        self._seen += size
        blocks = _CPU_BLOCKS if part.device.type == "cpu" else _DEVICE_BLOCKS
        for chunk in flat_chunks(integers, blocks * _BLOCK_BYTES // integers.element_size()):
            self._add(chunk.view(torch.uint8))

    def digest(self) -> str:
        """The checksum: 32 hexadecimal digits.

        Raises:
            DataError: The tensor is not complete yet.
        """
        if self._seen != self._expected:
            raise DataError(f"a tensor of shape {list(self.shape)} has {self._expected} bytes, but {self._seen} came")
        final = self._hash.copy()
        if size := self._rest.numel():
            # Zeros change no sum, and the shape tells how many bytes there are.
            padded = torch.nn.functional.pad(self._rest, (0, -size % 8))
            final.update(_hash_blocks(padded.view(torch.int64).unsqueeze(0)))
        return final.hexdigest()

    def _add(self, part: Tensor) -> None:
        """Hash the blocks that are full; keep the rest."""
        if self._rest.numel():
            missing = _BLOCK_BYTES - self._rest.numel()
            first, part = part[:missing], part[missing:]
            self._rest = torch.cat([self._rest.to(first.device), first])
            if self._rest.numel() < _BLOCK_BYTES:
                return
            self._hash.update(_hash_blocks(_as_words(self._rest)))
        whole = part.numel() // _BLOCK_BYTES * _BLOCK_BYTES
        if whole:
            self._hash.update(_hash_blocks(_as_words(part[:whole])))
        self._rest = part[whole:].clone()


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum for many named tensors, whatever their order.

    Args:
        checksums: A tensor's name → its checksum.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.blake2b(json.dumps(sorted(checksums.items())).encode(), digest_size=16).hexdigest()


def verify_checksums(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Check that a receiver has the tensors that a sender sent.

    Args:
        found: Name → checksum at the receiver.
        expected: Name → checksum at the sender.

    Raises:
        IntegrityError: Naming the tensors that differ, are missing, or are too many.
    """
    faults = {
        "differ": [name for name in expected if name in found and found[name] != expected[name]],
        "are missing": [name for name in expected if name not in found],
        "were not sent": [name for name in found if name not in expected],
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise IntegrityError(f"of {len(expected)} tensors, {listed}; send the weights again")


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def _as_words(bytes_B: Tensor) -> Tensor:
    """Whole blocks as words [blocks, 8192]; copied where they do not lie on a boundary of 8 bytes."""
    if bytes_B.storage_offset() % 8 or bytes_B.data_ptr() % 8:
        bytes_B = bytes_B.clone()
    return bytes_B.view(torch.int64).view(-1, _BLOCK_WORDS)


def _hash_blocks(words_NW: Tensor) -> bytes:
    """16 bytes for each of N blocks of W words. Integer arithmetic wraps around: it is modulo 2^64."""
    low_W, high_W = _keys(words_NW.device)[:, : words_NW.shape[1]]
    products_NW = (words_NW >> 32).mul_(high_W)
    upper_N = products_NW.sum(-1)
    whole_N = torch.mul(words_NW, low_W, out=products_NW).sum(-1)
    return to_bytes(torch.stack([whole_N, upper_N], dim=-1))


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """The keys of both sums [2, 8192]: odd outputs of SplitMix64 (Steele, Lea and Flood 2014) from 0."""
    mask, keys, state = 2**64 - 1, array.array("Q"), 0
    for _ in range(2 * _BLOCK_WORDS):
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        keys.append((mixed ^ (mixed >> 31)) | 1)
    return torch.frombuffer(keys, dtype=torch.int64).view(2, _BLOCK_WORDS).to(device)
