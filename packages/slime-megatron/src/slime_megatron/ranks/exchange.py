"""Exchange small values between ranks, as JSON.

torch exchanges objects as pickles, by which whoever took a rank's place could have the other ranks run any code.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_values(value: Any, group: Any = None) -> list[Any]:
    """The value of each rank of ``group``, all if it is ``None``, in their order. All its ranks call it.

    A value is what JSON can hold. Numbers come back bit by bit, with infinities and NaN; a tuple comes back as a list.
    """
    own = _bytes(value, group)
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device), group=group)
    lengths = [int(size) for size in sizes]
    rows = [own.new_empty(max(lengths)) for _ in range(ranks)]
    padded = torch.cat([own, own.new_zeros(max(lengths) - len(own))])
    dist.all_gather(rows, padded, group=group)
    return [_value(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_value(value: Any, source: int, group: Any) -> Any:
    """The value of rank ``source`` of all ranks, for each rank of ``group``. All its ranks call it."""
    own = _bytes(value, group)
    size = torch.tensor([len(own)], device=own.device)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        own = own.new_empty(int(size))
    dist.broadcast(own, source, group=group)
    return _value(own)


def _bytes(value: Any, group: Any) -> torch.Tensor:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return text if dist.get_backend(group) == "gloo" else text.to(torch.cuda.current_device())


def _value(text: torch.Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())
