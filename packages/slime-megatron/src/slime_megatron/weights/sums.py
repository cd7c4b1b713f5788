"""Checksums of the policy's weights, by name, that a changed bit changes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from slime_megatron.model.build import Chunks, named_weights
from slime_megatron.ranks.exchange import gather_values

LANES = 3
_ROW = 4096
_ROWS_AT_ONCE = 512  # torch copies what it adds up to int64: 16 MiB, where a whole embedding would take gigabytes
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSums:
    """Sums the bits of a model's weights. All ranks make one, and call it together."""

    def __init__(self, chunks: Chunks) -> None:
        own = [name for name, _ in named_weights(chunks)]
        self.names = sorted({name for names in gather_values(own) for name in names})
        self._places = {name: place for place, name in enumerate(self.names)}

    def __call__(self, chunks: Chunks) -> NDArray[np.uint32]:
        """The sums of all weights [names, LANES] over all ranks, modulo 2³².

        Ranks count differently, so that parts that change places do not cancel: two runs agree only if they have the
        same layout.
        """
        device = next(tensor.device for _, tensor in named_weights(chunks))
        sums = torch.zeros(len(self.names), LANES, dtype=torch.int64, device=device)
        for name, tensor in named_weights(chunks):
            sums[self._places[name]] += lane_sums(tensor)
        sums *= 2 * dist.get_rank() + 1  # odd, so that no bit is lost
        dist.all_reduce(sums)
        found: NDArray[np.uint32] = (sums & 0xFFFFFFFF).cpu().numpy().astype(np.uint32)
        return found


def lane_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of one weight [LANES], int64: of its numbers' bits, and two that depend on where they are."""
    flat = tensor.detach().reshape(-1)
    bits: torch.Tensor = flat.view(_INTEGERS[flat.element_size()])
    whole = len(bits) - len(bits) % _ROW
    column_sums = torch.zeros(_ROW, dtype=torch.int64, device=bits.device)
    rows = []
    for part in torch.split(bits[:whole].view(-1, _ROW), _ROWS_AT_ONCE):
        rows.append(part.sum(1, dtype=torch.int64))
        column_sums += part.sum(0, dtype=torch.int64)
    row_sums = torch.cat([*rows, bits[whole:].sum(0, keepdim=True, dtype=torch.int64)])
    column_sums[: len(bits) - whole] += bits[whole:]
    places = [torch.arange(1, len(sums) + 1, device=bits.device) for sums in (row_sums, column_sums)]
    return torch.stack([row_sums.sum(), (row_sums * places[0]).sum(), (column_sums * places[1]).sum()])
