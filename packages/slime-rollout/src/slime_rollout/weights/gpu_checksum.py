"""SGLang's checksum of a tensor on CUDA (0.5.23, `gpu_tensor_hash`), computed by torch on any device.

A word of 32 bits is mixed with its place by the finalizer of MurmurHash3, twice, with two seeds. The results are added
up in tiles of 8,192 words; each tile's two sums are mixed with the number of bytes and make a number of 64 bits; these
are added up and mixed by the finalizer of SplitMix64. All sums are modulo a power of two.
"""

from __future__ import annotations

import torch

_MASK, _MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_TILE = 8192
_AT_ONCE = 256 * _TILE
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK)
_PLACES = (0x27D4EB2D, 0x165667B1)
_TURNS = (15, 13)
_FINAL = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class GpuChecksum:
    """Takes a tensor in parts, one after the other, as if they were one."""

    def __init__(self) -> None:
        self._words = 0
        self._left = torch.empty(0, dtype=torch.uint8)
        self._tiles: list[torch.Tensor] = []

    def update(self, part: torch.Tensor) -> None:
        """Add the next part."""
        content = part.detach().contiguous().reshape(-1).view(torch.uint8)
        content = torch.cat([self._left.to(content.device), content])
        whole = len(content) - len(content) % (4 * _TILE)
        self._add(content[:whole])
        self._left = content[whole:].clone()

    def hexdigest(self) -> str:
        """16 hexadecimal digits, as the engine reports them."""
        last = GpuChecksum()
        last._words, last._tiles = self._words, list(self._tiles)
        last._add(torch.cat([self._left, self._left.new_zeros(-len(self._left) % 4)]))
        if not last._words:
            return f"{0:016x}"
        sums = torch.cat([tile.cpu() for tile in last._tiles], dim=1) ^ (4 * last._words & _MASK)
        high, low = _mixed(sums).tolist()
        total = sum((one << 32) + other for one, other in zip(high, low, strict=True)) & _MASK64
        return f"{_finished(total):016x}"

    def _add(self, content: torch.Tensor) -> None:
        """Sums [2, tiles] of whole words, which begin a tile."""
        for words in torch.split(content.view(torch.int32), _AT_ONCE):
            values = words.to(torch.int64) & _MASK
            places = torch.arange(self._words, self._words + len(values), device=values.device) & _MASK
            padding = -len(values) % _TILE
            both = []
            for seed, factor, turn in zip(_SEEDS, _PLACES, _TURNS, strict=True):
                turned = (places << turn | places >> (32 - turn)) & _MASK
                mixed = _mixed(values ^ ((places * factor + seed) & _MASK) ^ turned)
                both.append(torch.nn.functional.pad(mixed, (0, padding)).view(-1, _TILE).sum(1) & _MASK)
            if len(values):
                self._tiles.append(torch.stack(both))
            self._words += len(values)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3 of numbers of 32 bits in int64, whose products may wrap."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        values = (values ^ values >> shift) * factor & _MASK
    return values ^ values >> 16


def _finished(value: int) -> int:
    for shift, factor in zip((30, 27), _FINAL, strict=True):
        value = (value ^ value >> shift) * factor & _MASK64
    return value ^ value >> 31
